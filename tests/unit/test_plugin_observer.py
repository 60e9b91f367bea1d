"""What plugins hear of an engine, and what the server hears of them."""

import socket
import threading

from cardan.bootstrap.plugin_observer import PluginObserver
from cardan.core.engine.messages import Beat
from cardan.core.engine.wire import Connection
from cardan.core.interfaces.scheduling import RequestView
from cardan.core.types.engine_info import PluginReport, running_health
from cardan.core.types.outputs import EngineStats, Finish
from cardan.core.types.request import FinishReason

VIEW = RequestView("id", 0, 0, 0.0, 3, 16)
END = Finish(FinishReason.STOP)


class Plugins:
    """A plugin manager whose plugins implement ``hooks``."""

    def __init__(self, *hooks):
        self.hooks = hooks
        self.heard = []
        self.asked = threading.Semaphore(0)
        self.complaints = ()

    def implements(self, hook):
        return hook in self.hooks

    def notify(self, hook, **arguments):
        self.heard.append((hook, arguments))

    def health(self):
        self.asked.release()
        return self.complaints

    def metrics(self):
        return {"acme": {"heat": 3.0}}


def test_ends_are_told_after_the_clients_know():
    plugins = Plugins("cardan_request_finished")
    observer = PluginObserver(plugins)
    observer.note_end(VIEW, END)
    observer.step_completed(EngineStats())
    assert plugins.heard == []
    observer.flush()
    observer.flush()
    assert plugins.heard == [("cardan_request_finished", {"request": VIEW, "finish": END})]


def test_nobody_who_asks_nothing():
    plugins = Plugins()
    before = threading.active_count()
    observer = PluginObserver(plugins)
    observer.start()
    observer.note_end(VIEW, END)
    observer.flush()
    observer.close()
    assert plugins.heard == []
    assert threading.active_count() == before
    assert observer.report() == PluginReport()


def test_answers_are_renewed():
    plugins = Plugins("cardan_health")
    observer = PluginObserver(plugins, interval=0.001)
    observer.start()
    try:
        assert plugins.asked.acquire(timeout=20)
        plugins.complaints = ("plugin acme: too hot",)
        while not observer.report().complaints:
            assert plugins.asked.acquire(timeout=20)
        report = observer.report()
    finally:
        observer.close()
    assert report == PluginReport({"acme": {"heat": 3.0}}, ("plugin acme: too hot",))


def test_health_of_a_running_engine():
    assert running_health(0.5, PluginReport()).state == "ready"
    report = PluginReport({"a": {"x": 1.0}}, ("plugin a: cold", "plugin b: old"))
    health = running_health(0.5, report)
    assert (health.state, health.reason) == ("unhealthy", "plugin a: cold; plugin b: old")
    assert health.plugin_gauges == {"a": {"x": 1.0}}
    assert not health.is_serving


def test_a_report_travels_with_a_beat():
    ours, theirs = (Connection(end) for end in socket.socketpair())
    beat = Beat(0.25, PluginReport({"a": {"x": 1.0, "y": float("inf")}}, ("plugin a: cold",)))
    ours.send(beat)
    ours.close()
    assert list(theirs.receive()) == [beat]
    theirs.close()
