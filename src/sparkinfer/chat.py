"""Chat messages to token ids through the model file's own template.

The template is untrusted code: it runs in `template_process`. Message text is untrusted data: only
what the template itself writes may become a control token (see ContentGuard).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import GGUFError, RequestError
from .template_process import TemplateProcess
from .tokenizer import Tokenizer
from .vocabulary import MetadataFile, is_unicode

TEMPLATE_KEY = "tokenizer.chat_template"
ROLES = ("system", "user", "assistant", "tool")
FIELDS = ("role", "content", "reasoning_content", "name")
# What a request may set besides the messages, with the accepted type.
VARIABLES: Mapping[str, type] = {"enable_thinking": bool}

Message = Mapping[str, str]


class ChatTemplate:
    """A template bound to its tokenizer. Its worker process starts at once, before it is needed."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._process = TemplateProcess()

    @classmethod
    def from_gguf(cls, file: MetadataFile, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template of an open model file. Raises: GGUFError when there is none."""
        template = file.metadata.get(TEMPLATE_KEY)
        if not isinstance(template, str) or not template.strip():
            raise GGUFError(
                f"{file.path} has no chat template ({TEMPLATE_KEY}); "
                "use --raw to continue the prompt as plain text"
            )
        return cls(template, tokenizer)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, ready for the model's next turn.

        Raises: RequestError for bad messages, variables, or a template that refuses or exceeds a
        limit; GGUFError for a template that is not valid.
        """
        text, guard = self._render(messages, add_generation_prompt, variables)
        tokenizer = self._tokenizer
        ids: list[int] = []
        for piece in tokenizer.split(text, parse_special=True):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += tokenizer.encode(guard.show(piece), add_special=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that encode() turns into ids, for people to read. Raises: as encode()."""
        text, guard = self._render(messages, add_generation_prompt, variables)
        return guard.show(text)

    def close(self) -> None:
        """End the worker process; a later call starts it again."""
        self._process.close()

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, "ContentGuard"]:
        checked = check_messages(messages)
        chosen = check_variables(variables or {})
        texts = [text for message in checked for text in message.values()]
        guard = ContentGuard(self._tokenizer.control, "".join([self.template, *texts]))
        context = {
            "messages": [guard.hide_message(message) for message in checked],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._token_text(self._tokenizer.bos_id),
            "eos_token": self._token_text(self._tokenizer.eos_id),
            "tools": None,
            "documents": None,
        }
        return self._process.render(self.template, context | chosen), guard

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.vocabulary.tokens[token]


class ContentGuard:
    """Keeps message text from spelling a control token, through a template that sees it.

    Bars (the marks in `<|im_end|>`) of message text become private characters, one for one, and so
    does the first character of any control token without a bar that the text spells. The template
    sees text of the same length in which everything else is as written, so that it can search,
    split and trim. Whatever it makes of it, no control token with a bar comes out that it did not
    write; one without, only from a template that itself writes a part of it beside the text.
    """

    BARS = frozenset("|\N{FULLWIDTH VERTICAL LINE}")

    def __init__(self, control: Iterable[str], taken: str) -> None:
        """`control` are the texts of the control tokens; `taken` holds all characters in use."""
        texts = [text for text in control if text]
        bars = self.BARS.intersection("".join(texts))
        plain = sorted((t for t in texts if bars.isdisjoint(t)), key=len, reverse=True)
        used = set(taken)
        free = (c for c in map(chr, range(0x10FFFD, 0xFFFFF, -1)) if c not in used)
        swaps = dict(zip(sorted(bars.union(t[0] for t in plain)), free, strict=False))
        self._hide = str.maketrans({bar: swaps[bar] for bar in bars})
        self._show = str.maketrans({private: char for char, private in swaps.items()})
        self._plain = re.compile("|".join(map(re.escape, plain))) if plain else None
        self._swaps = swaps

    def hide(self, text: str) -> str:
        """`text` with every way to spell a control token blocked."""
        text = text.translate(self._hide)
        while self._plain is not None and self._plain.search(text):
            text = self._plain.sub(lambda m: self._swaps[m[0][0]] + m[0][1:], text)
        return text

    def hide_message(self, message: Message) -> dict[str, str]:
        """The message with all its fields but the role hidden."""
        return {k: v if k == "role" else self.hide(v) for k, v in message.items()}

    def show(self, text: str) -> str:
        """The inverse of hide(), also on parts of its result."""
        return text.translate(self._show)


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages, each with a known role and text content. Raises: RequestError."""
    if not messages:
        raise RequestError("the conversation has no messages; give at least one")
    for index, message in enumerate(messages):
        _check_message(index, message)
    return list(messages)


def _check_message(index: int, message: Message) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is {type(message).__name__}, expected a mapping")
    unknown = sorted(map(str, message.keys() - set(FIELDS)))
    if unknown:
        raise RequestError(
            f"message {index} has the field {unknown[0][:40]!r}; accepted: {', '.join(FIELDS)}"
        )
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"message {index} has the role {str(role)[:40]!r}; accepted: {', '.join(ROLES)}"
        )
    for field in dict.fromkeys(("content", *message)):
        text = message.get(field)
        if not isinstance(text, str):
            raise RequestError(f"message {index}: {field} is {type(text).__name__}, expected text")
        if not is_unicode(text):
            raise RequestError(f"message {index}: {field} has half a surrogate pair: not Unicode")


def check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The template variables of a request. Raises: RequestError for others than VARIABLES."""
    for name, value in variables.items():
        kind = VARIABLES.get(name)
        if kind is None:
            accepted = ", ".join(VARIABLES)
            raise RequestError(
                f"template variable {name[:40]!r} is not accepted; known: {accepted}"
            )
        if not isinstance(value, kind):
            raise RequestError(
                f"template variable {name} is {type(value).__name__}, expected {kind.__name__}"
            )
    return dict(variables)
