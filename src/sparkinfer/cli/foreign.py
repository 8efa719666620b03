"""Flags of llama.cpp that this program does not have, and what stands in their place.

Without this, `-ngl 99` would be read as `-n gl`, `-fa` as `-f a` and `-hf` as a call for help.
"""

from collections.abc import Sequence

from sparkinfer.errors import OptionError

VERBS = ("run", "chat", "bench", "check")
_DEVICE = "--device (auto, cpu, cuda) says where the whole model runs"
_CACHE = "use --kv-cache (f16, f32, q8_0)"
_PLANNER = "the planner finds the number of drafted tokens; --draft-max N fixes it"
_CHAT = "use sparkinfer chat"
_NOTHING = "nothing is to be set here; leave it out"
_SHOW = "use --stats, --print-plan or --debug"
_TEXTS = (
    "-p",
    "--prompt",
    "-sys",
    "--system",
    "--system-prompt",
    "-r",
    "--stop",
    "--reverse-prompt",
)

FOREIGN = {
    **dict.fromkeys(
        ("-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "-dev", "-sm", "-mg"), _DEVICE
    ),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), _CACHE),
    **dict.fromkeys(("-ctkd", "-ctvd"), "a draft's cache stays in float16; leave it out"),
    **dict.fromkeys(("--draft-min", "--draft-n-min", "--draft-p-min", "--draft-n"), _PLANNER),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "use -m hf:user/repo[:quant]"),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), _CHAT),
    **dict.fromkeys(("-st", "--single-turn"), "use sparkinfer run"),
    **dict.fromkeys(
        ("-fa", "--flash-attn", "-b", "--batch-size", "-ub", "--ubatch-size"), _NOTHING
    ),
    **dict.fromkeys(("--jinja", "--mlock", "--no-mmap", "-e", "--escape", "--color"), _NOTHING),
    **dict.fromkeys(("--no-display-prompt", "--log-disable", "--no-warmup"), _NOTHING),
    **dict.fromkeys(("-tb", "--threads-batch"), "-t is for prompts and answers"),
    **dict.fromkeys(("-np", "--parallel"), "one request runs at a time; leave it out"),
    **dict.fromkeys(("-v", "--verbose", "-lv", "--verbosity"), _SHOW),
    "--max-tokens": "use -n",
}


def refuse_foreign(arguments: Sequence[str]) -> None:
    """Raise OptionError for the first flag that only llama.cpp has."""
    if not arguments or arguments[0] not in VERBS:
        return
    before = ""
    for argument in arguments[1:]:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        if name in FOREIGN and before not in _TEXTS:
            raise OptionError(f"no option {name} here, as llama.cpp has it: {FOREIGN[name]}")
        before = argument
