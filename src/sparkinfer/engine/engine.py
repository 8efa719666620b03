"""Engine: a loaded model and the calls that make text with it."""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from sparkinfer.decoding import AutoregressiveDecoder, Decoder, Progress, TargetLike
from sparkinfer.engine.generation import Generation
from sparkinfer.engine.output import DetokenizerLike, Output
from sparkinfer.engine.prefix import PrefixCache
from sparkinfer.engine.request import Request, RequestOptions, build_request
from sparkinfer.engine.result import FinishReason, Result
from sparkinfer.engine.stop import StopScanner
from sparkinfer.errors import RequestError
from sparkinfer.sampling import Sampler

if TYPE_CHECKING:
    from sparkinfer.engine.conversation import Conversation
    from sparkinfer.gguf import GGUFFile
    from sparkinfer.models import Target
    from sparkinfer.options import Options

LoadProgress = Callable[[str, int, int], None]  # (what, done, total)
Message = Mapping[str, str]


class TokenizerLike(Protocol):
    """What the engine needs of a tokenizer (`sparkinfer.tokenizer.Tokenizer`)."""

    n_vocab: int
    stop_ids: frozenset[int]

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]: ...
    def is_control(self, token: int, /) -> bool: ...
    def is_unused(self, token: int, /) -> bool: ...
    def detokenizer(self, *, skip_special: bool = False) -> DetokenizerLike: ...


class TemplateLike(Protocol):
    """What the engine needs of a chat template (`sparkinfer.chat.ChatTemplate`)."""

    def encode(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None
    ) -> list[int]: ...
    def close(self) -> None: ...


class EngineTarget(TargetLike, Protocol):
    """A target that the engine owns."""

    def close(self) -> None: ...


class Engine:
    """Generates text with one model, one request at a time.

    The state of the last request is kept: a prompt that begins with the same tokens, such as the
    next turn of a chat, computes only what is new. Starting a generation cancels an unfinished one.
    """

    def __init__(
        self,
        target: EngineTarget,
        tokenizer: TokenizerLike,
        template: TemplateLike | None = None,
        *,
        decoder: Decoder | None = None,
        off: str = "no draft given",
        load_seconds: float = 0.0,
    ) -> None:
        """`decoder` None decodes plainly, for the reason `off`."""
        self.target = target
        self.tokenizer = tokenizer
        self.template = template
        self._plain = AutoregressiveDecoder(target)
        self.decoder: Decoder = decoder or self._plain
        self._off = off
        self.load_seconds = load_seconds
        self._prefix = PrefixCache(target)
        self._n_vocab = _known_ids(tokenizer)
        self._busy = threading.Lock()
        self._running: Generation | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        context: int | None = None,
        threads: int | None = None,
        activations: Literal["int8", "f32"] | None = None,
        kv_cache: Literal["auto", "f32", "f16", "q8_0"] | None = None,
        draft: str | Path | None = None,
        spec: Literal["auto", "on", "off"] | None = None,
        progress: LoadProgress | None = None,
    ) -> "Engine":
        """Open a GGUF file and make an engine of it; None takes the process option's value.

        Speculative decoding is on with a `draft` (a GGUF file or a folder; None: the one that comes with this package
        for this model, if there is one), unless `spec` is "off".
        Raises: MissingFileError, GGUFError, UnsupportedError, ShapeError, MemoryLimitError, OptionError.
        """
        from sparkinfer.chat import TEMPLATE_KEY, ChatTemplate
        from sparkinfer.dflash.config_gguf import is_draft
        from sparkinfer.errors import UnsupportedError
        from sparkinfer.gguf import open_gguf
        from sparkinfer.models import load_target
        from sparkinfer.options import resolve
        from sparkinfer.tokenizer import Tokenizer

        started = perf_counter()
        options = resolve({"draft": None if draft is None else Path(draft), "spec": spec})
        with ExitStack() as undo:
            file = undo.enter_context(open_gguf(path))
            if is_draft(file):
                raise UnsupportedError(
                    f"{path} is a draft; give the model it was trained for, and the draft with -md"
                )
            _check_draft(file, options)  # loading takes long, to say then that it is not there
            tokenizer = Tokenizer.from_gguf(file)
            template = None
            if TEMPLATE_KEY in file.metadata:
                template = undo.enter_context(closing(ChatTemplate.from_gguf(file, tokenizer)))
            target = load_target(
                file,
                context=context,
                threads=threads,
                activations=activations,
                kv_cache=kv_cache,
                progress=progress,
            )
            undo.callback(target.close)
            decoder, off = _decoder(target, options, progress)
            undo.pop_all()  # the engine closes them from here on
        seconds = perf_counter() - started
        return cls(target, tokenizer, template, decoder=decoder, off=off, load_seconds=seconds)

    @property
    def context(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._prefix.context

    @property
    def plan(self) -> Mapping[str, Any]:
        """Everything that was resolved at load, for records."""
        return {**self.target.plan, "decoder": self.decoder.name, **self.decoder.plan}

    @property
    def speculation(self) -> str:
        """One line: whether tokens are drafted, with which draft, and what that is expected to gain."""
        return self.decoder.describe() or f"off ({self._off})"

    def generate(
        self,
        prompt: str | Sequence[int] | Request,
        *,
        progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Run a prompt to its end.

        Raises: RequestError for a request that cannot be served, ModelOutputError for logits that
        are not numbers.
        """
        return self.stream(prompt, progress=progress, **options).result

    def stream(
        self,
        prompt: str | Sequence[int] | Request,
        *,
        progress: Progress | None = None,
        on_finish: Callable[[Result], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """A Generation to iterate; `progress(done, total)` follows the prompt's tokens.

        Raises: as `generate`; a bad request here already, not at the first piece.
        """
        request = self.request(prompt, **options)
        sampler, output = self._prepare(request)
        if self._running is not None:
            self._running.cancel()
        self._running = Generation(
            request,
            self.decoder if request.speculate else self._plain,
            self._prefix,
            sampler,
            output,
            progress=progress,
            on_finish=on_finish,
            load_seconds=self.load_seconds,
            busy=self._busy,
        )
        return self._running

    def chat(
        self,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The answer to a list of {"role": ..., "content": ...} messages.

        `variables` go to the chat template. Raises: as `generate`, and RequestError for a model
        without a template or messages that it refuses.
        """
        prompt = self.encode_chat(messages, variables)
        return self.stream(prompt, progress=progress, **options).result

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """As `chat`, as a Generation to iterate."""
        prompt = self.encode_chat(messages, variables)
        return self.stream(prompt, progress=progress, **options)

    def conversation(
        self, system: str | None = None, **options: Unpack[RequestOptions]
    ) -> "Conversation":
        """A chat that remembers its messages; `options` hold for every turn."""
        from sparkinfer.engine.conversation import Conversation

        return Conversation(self, system, **options)

    def request(
        self, prompt: str | Sequence[int] | Request, **options: Unpack[RequestOptions]
    ) -> Request:
        """The checked Request of a call. Text is encoded without parsing control tokens in it."""
        if isinstance(prompt, Request):
            if options:
                raise RequestError("a Request has its options already; none can be added")
            return prompt
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return build_request(ids, options)

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Prompt tokens of messages.

        Raises: RequestError without a template or for messages it refuses.
        """
        if self.template is None:
            raise RequestError("the model file has no chat template; give it a plain prompt")
        return self.template.encode(messages, variables=variables)

    def reset(self) -> None:
        """Forget the kept state; the next prompt is computed from its first token."""
        if self._running is not None:
            self._running.cancel()
        self._prefix.invalidate()

    def close(self) -> None:
        """Release the model."""
        self.reset()
        if self.template is not None:
            self.template.close()
        self.target.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self, request: Request) -> tuple[Sampler, Output]:
        params = request.sampling
        self._check_ids(request)
        room = self._room(request)
        limit, reason = _limit(request.max_tokens, room)
        stops = self._stop_ids(request)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sampler = Sampler(params, self._n_vocab, seed=seed, stop_ids=stops)
        output = Output(
            self.tokenizer.detokenizer(skip_special=True),
            StopScanner(request.stop),
            stops,
            limit,
            reason,
            params.min_tokens,
        )
        return sampler, output

    def _check_ids(self, request: Request) -> None:
        last = self.tokenizer.n_vocab - 1
        for name, ids in (("the prompt", request.prompt), ("stop_ids", request.stop_ids)):
            if ids and max(ids) > last:
                raise RequestError(f"{name} has token id {max(ids)}; ids go from 0 to {last}")

    def _room(self, request: Request) -> int:
        length = len(request.prompt)
        if length > self.context:
            raise RequestError(
                f"the prompt has {length} tokens, the context holds {self.context}; "
                "shorten the prompt or raise the context"
            )
        return self.context - length

    def _stop_ids(self, request: Request) -> dict[int, str | None]:
        """Ending ids; a stop string that is one control token ends by its id, as it has no text."""
        own = frozenset() if request.ignore_eos else self.tokenizer.stop_ids
        ids: dict[int, str | None] = dict.fromkeys(own.union(request.stop_ids))
        for text in request.stop:
            parsed = self.tokenizer.encode(text, add_special=False, parse_special=True)
            if len(parsed) == 1 and self.tokenizer.is_control(parsed[0]):
                ids[parsed[0]] = text
        return ids


def _check_draft(file: "GGUFFile", options: "Options") -> None:
    """Open the draft that was asked for and compare it with the model, before either is loaded."""
    path = options.optional_path("draft")
    if path is None or options.text("spec") == "off":
        return
    from sparkinfer.dflash.draft import check_draft
    from sparkinfer.models.config import read_config

    check_draft(path, read_config(file))


def _decoder(
    target: "Target", options: "Options", progress: LoadProgress | None
) -> tuple[Decoder | None, str]:
    """The decoder of the draft that is asked for or comes with the model; or None and why."""
    from sparkinfer.dflash.shipped import shipped_draft

    if options.text("spec") == "off":
        return None, "switched off"
    draft = options.optional_path("draft") or shipped_draft(target.file)
    if draft is None:
        return None, "no draft given"
    from sparkinfer.dflash.build import load_decoder

    return load_decoder(target, draft, options, progress), ""


def _limit(max_tokens: int | None, room: int) -> tuple[int, FinishReason]:
    if max_tokens is not None and max_tokens <= room:
        return max_tokens, "length"
    return room, "context"


def _known_ids(tokenizer: TokenizerLike) -> int:
    """Ids below this may be chosen: unused ones at the vocabulary's end are padding."""
    count = tokenizer.n_vocab
    while count > 1 and tokenizer.is_unused(count - 1):
        count -= 1
    return count
