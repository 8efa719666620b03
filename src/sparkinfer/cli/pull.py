"""`sparkinfer pull`: fetch a model, or check the one that is here."""

from typing import Annotated

import typer

from sparkinfer.cli.console import progress, status
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.options import Options


@verb(ProcessFlags())
def command(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="A known name, hf:user/repo[:quant] or a file; none lists the names."),
    ] = None,
    options: Options,
) -> None:
    """Fetch a model and print its path; a file that is here already is checked."""
    if model is None:
        _print_known(options)
        return
    from sparkinfer import pull
    from sparkinfer.gguf.reader import open_gguf

    with progress(options) as report:
        path = pull.locate(model, options.path("model_dir"), report, verify=True)
        digest = pull.sha256_of(path, report)
    with open_gguf(path) as file:
        words = f"{file.architecture}, {len(file.tensors)} tensors"
    status(f"{words}, {path.stat().st_size / 1e6:.1f} MB, SHA-256 {digest}")
    print(path)


def _print_known(options: Options) -> None:
    from sparkinfer import pull

    for model in pull.PACKAGED.values():
        here = (options.path("model_dir") / model.filename).is_file()
        print(
            f"{model.name:10} {model.summary}, {model.size / 1e6:.0f} MB, {model.licence}"
            f" ({'here' if here else 'not fetched'})"
        )
    status("also: hf:user/repo[:quant], or the path of a GGUF file")
