"""Facts about machine code that neither the compiler's report nor the interpreter shows."""

import re

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);")
_UNIFORM = re.compile(r"(gdesc|desc)?\[?(?<![A-Z])UR(\d+)")
_PREDICATE = re.compile(r"U?P[T0-9]")


def unset_uniforms(sass: str) -> list[str]:
    """Instructions that read a uniform register which no instruction above them wrote.

    ptxas 12.8 loses definitions when a kernel's matrix descriptors do not fit into the uniform registers. A product
    then takes an operand from a wrong place of shared memory, though the PTX is right.
    """
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, text = match[1], match[2]
        operands = [operand.strip() for operand in text.split(",")]
        while operands and _PREDICATE.fullmatch(operands[0]):
            del operands[0]
        target = _target(name, operands)
        sources = operands if target is None else operands[1:]
        if _read(name, text, sources) - written:
            found.append(line.strip())
        if target is not None:
            pair = ".64" in name or ".WIDE" in name
            written |= set(range(target, target + (2 if pair else 1)))
    return found


def _target(name: str, operands: list[str]) -> int | None:
    """The uniform register that an instruction writes first."""
    writes = name.startswith("U") or name.split(".")[0] in ("S2UR", "R2UR", "VOTEU", "REDUX")
    if writes and operands and re.fullmatch(r"UR\d+", operands[0]):
        return int(operands[0][2:])
    return None


def _read(name: str, text: str, sources: list[str]) -> set[int]:
    """A matrix instruction reads two descriptors of two registers; with its left side in registers only the second."""
    numbers: set[int] = set()
    for source in sources:
        for kind, register in _UNIFORM.findall(source):
            first, count = int(register), 1
            if kind == "gdesc":
                left_in_registers = re.search(r"R\d+, R\d+, gdesc", text) is not None
                first, count = (first + 2, 2) if left_in_registers else (first, 4)
            elif kind == "desc" or name.endswith(".64"):
                count = 2
            numbers |= set(range(first, first + count))
    return numbers
