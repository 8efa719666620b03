"""How the program ends when it is interrupted, or when its outputs are closed, full or of another encoding."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PACKAGE = Path(__file__).parents[2] / "src"
MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-tiny-F32.gguf"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "COLUMNS": "80", **more}


def shell(command: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = command.replace("sparkinfer", f"{sys.executable} -m sparkinfer")
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment(**more),
    )


NEVER = """
from sparkinfer.backend import workers
from sparkinfer.cli import main
import sys
workers._PROGRAM = "import time; time.sleep(1000)"
workers.default_threads = lambda: 2
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupt_while_kernels_are_compiled_leaves_nothing_running() -> None:
    """The compiling processes of this program never answer: it must not wait for them, nor leave them behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", NEVER, "run", "-m", str(MODEL), "--device", "cpu", "--raw", "a"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        compiling: list[psutil.Process] = []
        while not compiling:
            assert process.poll() is None
            children = psutil.Process(process.pid).children()
            compiling = [child for child in children if "time.sleep" in " ".join(child.cmdline())]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "first run: compiling for this CPU, once, which takes some seconds ...\n"
        gone, alive = psutil.wait_procs(compiling, timeout=60)
        assert gone and not alive
    finally:
        process.kill()


@pytest.mark.parametrize(
    "words", ["options", "options --markdown", "--help", "run --help", "pull", "inspect MODEL"]
)
def test_a_reader_that_went_away_is_141(words: str) -> None:
    done = shell(f"(sparkinfer {words}; echo $? >&2) | true".replace("MODEL", str(MODEL)))
    assert done.stderr == "141\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", ["options", "--help", "inspect MODEL"])
def test_a_full_disk_is_one_line(words: str) -> None:
    done = shell(f"sparkinfer {words} > /dev/full".replace("MODEL", str(MODEL)))
    assert done.returncode == 69
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_is_said_beside_the_answer_cannot_end_it() -> None:
    done = shell(f"sparkinfer run -m {MODEL} --raw a -n 2 2> /dev/full")
    assert done.returncode == 0 and done.stdout


def test_closed_streams_lead_nowhere() -> None:
    assert shell(f"sparkinfer run -m {MODEL} --raw a -n 2 >&-").returncode == 0
    assert shell(f"sparkinfer run -m {MODEL} --raw a -n 2 2>&-").returncode == 0
    assert shell("sparkinfer options >&-").returncode == 0
    done = shell(f"sparkinfer run -m {MODEL} --raw <&-")
    assert done.returncode == 2 and "no prompt given, and standard input is empty" in done.stderr


ANSWER = """
import sys
sys.path.insert(0, sys.argv[1])
import sparkinfer.cli.loading as loading
from sparkinfer.cli import main
from test_verb_run import A, E1, E2, scripted
loading.load_engine = lambda *_: scripted([A, E1, E2])
sys.exit(main(["run", "-m", "toy", "a"]))
"""


def test_a_terminal_without_the_letter_shows_its_number() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(here)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(PYTHONPATH=f"{PACKAGE}:{here}:{here.parent}", PYTHONIOENCODING="ascii"),
    )
    assert (done.returncode, done.stdout) == (0, "a\\xe9\n")
    assert " | first token after " in done.stderr and "\\" not in done.stderr
