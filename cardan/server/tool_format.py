"""The form in which the model at hand writes tool calls: which parser reads its answers."""

import logging

from cardan.core.discovery import PARSERS, Discovery, describe
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.tool_parsing import ToolParser

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
ToolFormat = type[ToolParser]


def load_tool_format(name: str, discovery: Discovery) -> ToolFormat | None:
    """The parser called ``name``; None for "auto", which depends on the model, and "none".

    Raises:
        PluginError: there is none of that name, or it cannot be used.
    """
    if name in (AUTO, NONE):
        return None
    loaded = discovery.load(PARSERS, name)
    if not (isinstance(loaded, type) and issubclass(loaded, ToolParser)):
        raise PluginError(
            f"tool parser {name} is not a subclass of "
            "cardan.core.interfaces.tool_parsing.ToolParser"
        )
    return loaded


def find_tool_format(
    name: str, chat_template: str | None, discovery: Discovery
) -> ToolFormat | None:
    """The parser called ``name``; for "auto" the first, by name, that knows ``chat_template``.

    A parser that fails there is logged and passed over.

    Raises:
        PluginError: as ``load_tool_format``.
    """
    if name != AUTO:
        return load_tool_format(name, discovery)
    # A template that says nothing of tools shows none to the model.
    if chat_template is None or "tools" not in chat_template:
        return None
    for candidate in discovery.names(PARSERS):
        try:
            loaded = load_tool_format(candidate, discovery)
            if loaded is not None and loaded.detect(chat_template):
                return loaded
        except Exception as error:
            reason = str(error) if isinstance(error, PluginError) else describe(error)
            logger.warning("tool parser %s is passed over: %s", candidate, reason)
    return None
