"""Order of requests under the policies of the tree."""

from cardan.core.discovery import POLICIES, Discovery
from cardan.core.interfaces.scheduling import RequestView
from cardan.plugins.policies import FirstComePolicy, PriorityPolicy


def view(arrival: int, priority: int = 0) -> RequestView:
    return RequestView(f"r{arrival}", priority, arrival, 10.0 - arrival, 5, 5)


def order(policy, requests):
    return [item.arrival for item in sorted(requests, key=policy.sort_key)]


def test_first_come_ignores_priority():
    requests = [view(2, -5), view(0, 9), view(1)]
    assert order(FirstComePolicy(), requests) == [0, 1, 2]


def test_lower_priority_goes_first_and_ties_run_as_they_came():
    requests = [view(0, 1), view(1, -1), view(2, 1), view(3, -1), view(4, 0)]
    assert order(PriorityPolicy(), requests) == [1, 3, 4, 0, 2]


def test_huge_priorities_stay_apart():
    requests = [view(0, 2**60 + 1), view(1, 2**60)]
    assert order(PriorityPolicy(), requests) == [1, 0]


def test_both_admit():
    assert FirstComePolicy().admit(view(0), 100, 100) is None
    assert PriorityPolicy().admit(view(0), 100, 100) is None


def test_they_are_found_by_name():
    discovery = Discovery()
    for policy in (FirstComePolicy, PriorityPolicy):
        assert discovery.load(POLICIES, policy.name) is policy
