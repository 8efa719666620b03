"""`sparkinfer verify`: is a receipt what it was when it was signed, and does its verdict follow from its samples?"""

from pathlib import Path
from typing import Annotated

import typer

from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.options import Options


@verb(ProcessFlags())
def command(
    *,
    file: Annotated[Path, typer.Argument(help="A receipt, as `sparkinfer eval` writes it.")],
    trusted: Annotated[
        list[str] | None,
        typer.Option("--trusted", help="Fingerprint or public key file that must have signed."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="The ledger that must hold the receipt.")
    ] = None,
    head: Annotated[
        str | None, typer.Option("--head", help="A published hash that the ledger must contain.")
    ] = None,
    options: Options,
) -> int:
    """Check a receipt by doing it again, and say what that proves and what not; exit 1 on any mismatch."""
    from sparkinfer.evaluation.verify import verify

    found = verify(file, trusted=trusted or None, ledger=ledger, head=head)
    for line in found.lines():
        print(line)
    return found.exit_code
