"""llama.cpp as a side, through llama-cpp-python's low-level API.

Settings: `model` (path), `threads`, `context`. Best settings found for the CPU: flash attention
on, batches of 512, 16-bit KV cache, weights repacked at load where the format allows it.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Mapping
from typing import Any

import llama_cpp
import numpy as np
from protocol import Reply, run_side

FLASH_ATTENTION_ON = 1
BATCH = 512


class LlamaCpp:
    """One model and one context; states at a depth are computed once and restored by copy."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        if not settings.get("verbose"):
            llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_mmap = bool(settings.get("mmap", True))
        model_params.use_extra_bufts = bool(settings.get("repack", True))
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), model_params)
        if not self.model:
            raise ValueError(f"llama.cpp could not load {settings['model']}")
        self.context = llama_cpp.llama_init_from_model(self.model, self._params(settings))
        if not self.context:
            raise ValueError("llama.cpp could not create a context")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.states: dict[tuple[int, ...], Any] = {}
        self.length = 0
        self.load_s = time.perf_counter() - start

    @staticmethod
    def _params(settings: Mapping[str, Any]) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings["context"]
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.n_seq_max = 1
        params.flash_attn_type = settings.get("flash_attention", FLASH_ATTENTION_ON)
        params.no_perf = True
        return params

    def info(self) -> Reply:
        description = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.model, description, 256)
        return {
            "engine": "llama.cpp",
            "versions": {
                "llama-cpp-python": llama_cpp.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "plan": {
                "system": llama_cpp.llama_print_system_info().decode(),
                "model": description.value.decode(),
                "flash_attention": True,
                "batch": BATCH,
                "kv": "f16",
            },
            "n_vocab": self.n_vocab,
            "weight_bytes_per_token": None,
            "model_bytes": llama_cpp.llama_model_size(self.model),
            "load_s": self.load_s,
        }

    # -- state ---------------------------------------------------------------------------------

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.length = 0

    def _fill(self, tokens: list[int], rows: str) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = rows == "all"
        batch.logits[len(tokens) - 1] = rows != "none"

    def _decode(self) -> None:
        code = llama_cpp.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} at position {self.length}")
        self.length += self.batch.n_tokens

    def _view(self, rows: int) -> np.ndarray:
        """Logits of the last decode, [rows, n_vocab] float32, no copy; waits for the result."""
        pointer = llama_cpp.llama_get_logits(self.context)
        address = ctypes.addressof(pointer.contents)
        array = (ctypes.c_float * (rows * self.n_vocab)).from_address(address)
        return np.frombuffer(array, dtype=np.float32).reshape(rows, self.n_vocab)

    def _feed(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), BATCH):
            self._fill(tokens[start : start + BATCH], "last")
            self._decode()

    def _at(self, context: list[int]) -> None:
        """Put the state at the end of `context`; computed once, then restored by copy."""
        key = tuple(context)
        self._clear()
        if not context:
            return
        if key not in self.states:
            self._feed(context)
            size = llama_cpp.llama_state_seq_get_size(self.context, 0)
            buffer = (ctypes.c_uint8 * size)()
            if llama_cpp.llama_state_seq_get_data(self.context, buffer, size, 0) != size:
                raise RuntimeError("llama.cpp did not give its state")
            self.states[key] = buffer
            self._clear()
        buffer = self.states[key]
        if not llama_cpp.llama_state_seq_set_data(self.context, buffer, len(buffer), 0):
            raise RuntimeError("llama.cpp did not take its state back")
        self.length = len(context)

    # -- measurements --------------------------------------------------------------------------

    def prompt(self, tokens: list[int]) -> Reply:
        self._clear()
        chunks = [tokens[i : i + BATCH] for i in range(0, len(tokens), BATCH)]
        start = time.perf_counter()
        for i, chunk in enumerate(chunks):
            self._fill(chunk, "last" if i + 1 == len(chunks) else "none")
            self._decode()
        best = int(self._view(1)[0].argmax())
        return {"seconds": time.perf_counter() - start, "argmax": best}

    def decode(self, context: list[int], tokens: list[int]) -> Reply:
        self._at(context)
        best = []
        start = time.perf_counter()
        for token in tokens:
            self._fill([token], "last")
            self._decode()
            best.append(int(self._view(1)[0].argmax()))
        return {"seconds": time.perf_counter() - start, "argmax": best}

    def speculate(self, context: list[int], tokens: list[int], **_ours: object) -> Reply:
        """Plain decoding of the same answer: the prompt's last row gives its first token."""
        return self.decode(context[:-1], context[-1:] + tokens[:-1])

    def rows(self, context: list[int], tokens: list[int], repeats: int) -> Reply:
        seconds = []
        for _ in range(repeats):
            self._at(context)
            self._fill(tokens, "all")
            start = time.perf_counter()
            self._decode()
            logits = self._view(len(tokens))
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "argmax": logits.argmax(axis=1).tolist()}

    # -- text ----------------------------------------------------------------------------------

    def greedy(self, tokens: list[int], count: int) -> Reply:
        self._clear()
        self._feed(tokens)
        found: list[int] = []
        margins: list[float] = []
        while True:
            second, first = np.partition(self._view(1)[0], -2)[-2:]
            found.append(int(self._view(1)[0].argmax()))
            margins.append(float(first - second))
            if len(found) == count:
                return {"tokens": found, "margins": margins}
            self._feed(found[-1:])

    def logits(self, tokens: list[int], path: str) -> Reply:
        if len(tokens) > BATCH:
            raise ValueError(f"{len(tokens)} tokens; at most {BATCH} are read in one batch")
        self._clear()
        self._fill(tokens, "all")
        self._decode()
        np.save(path, self._view(len(tokens)))
        return {"rows": len(tokens)}

    def tokenize(self, text: str) -> Reply:
        raw = text.encode()
        found = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), found, len(found), True, True)
        if count < 0:
            raise RuntimeError(f"llama_tokenize returned {count}")
        return {"tokens": list(found[:count])}


if __name__ == "__main__":
    run_side(LlamaCpp)
