"""A chat that keeps its messages; the engine keeps its tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from sparkinfer.decoding import Progress
from sparkinfer.engine.generation import Generation
from sparkinfer.engine.request import RequestOptions
from sparkinfer.engine.result import Result

if TYPE_CHECKING:
    from sparkinfer.engine.engine import Engine


class Conversation:
    """Messages of one chat; `send` returns the answer as a Generation to iterate.

    Question and answer join `messages` once the answer has ended, cancelled ones included, so an
    error leaves the conversation as it was.
    """

    def __init__(
        self, engine: "Engine", system: str | None = None, **options: Unpack[RequestOptions]
    ) -> None:
        self.engine = engine
        self.options = options
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def send(
        self, text: str, *, progress: Progress | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Ask; `options` replace those of the conversation for this turn.

        Raises: RequestError if the messages no longer fit the context, or as `Engine.stream`.
        """
        question = {"role": "user", "content": text}
        prompt = self.engine.encode_chat([*self.messages, question])
        merged: RequestOptions = {**self.options, **options}
        remember = self._remember(question)
        return self.engine.stream(prompt, progress=progress, on_finish=remember, **merged)

    def _remember(self, question: dict[str, str]) -> Callable[[Result], None]:
        def append(result: Result) -> None:
            answer = {"role": "assistant", "content": result.text}
            self.messages += [question, answer]

        return append

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [item for item in self.messages if item["role"] == "system"]
