"""Text in front of the engine: tokenizers, chat templates, detokenizing, stop strings."""

from cardan.core.text.chat_template import ChatTemplate
from cardan.core.text.detokenizer import Detokenizer
from cardan.core.text.errors import TextError
from cardan.core.text.stop import StopMatcher, StopResult
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.text.tokenizer_files import load_tokenizer
from cardan.core.text.tokenizer_gguf import tokenizer_from_gguf

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "StopResult",
    "TextError",
    "Tokenizer",
    "load_tokenizer",
    "tokenizer_from_gguf",
]
