"""Facts about machine code that neither the compiler's report nor the interpreter shows."""

import re
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?);")
_REGISTER = re.compile(r"(gdesc|desc)?\[?(?<![A-Z])(U?R)(\d+)(\.64)?")
_PREDICATE = re.compile(r"U?P[T0-9]")
_NO_TARGET = (
    "ST", "RED.", "BAR", "BRA", "EXIT", "MEMBAR", "FENCE", "WARP", "DEPBAR", "CCTL", "LDGSTS", "LDGDEPBAR", "NOP",
)  # fmt: skip
_SHARED = (
    "LDS",
    "STS",
    "SYN",
)  # an address in shared memory is one register, however much they move
_LABEL = re.compile(r"^(\.L_x_\d+):")
_JUMP = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+.*?BRA.*`\((\.L_x_\d+)\)")
_DATA = (
    "LD",
    "ULDC",
    "F",
    "HADD",
    "HFMA",
    "HMUL",
    "HGMMA",
    "HMMA",
    "MUFU",
    "SHFL",
    "ATOM",
    "DADD",
    "DMUL",
    "DFMA",
)
_PARTIAL = ("LOP3", "PRMT")  # write bits or halves of a register
Registers = set[tuple[str, int]]


def unset_registers(sass: str) -> list[str]:
    """Instructions that read a register which no instruction above them wrote.

    ptxas 12.8 loses the definition of a matrix descriptor when two of them share an address and differ in their mode. A
    product then takes an operand from a wrong place of shared memory, though the PTX is right. Of a thread's own
    registers only those count that an instruction reads and writes: others may come from a subroutine, which stands
    below. A register that is filled bit by bit or half by half begins unset and counts as right.
    """
    written: Registers = set()
    found = []
    for line in sass.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, operands = match[1], [operand.strip() for operand in match[2].split(",")]
        while operands and _PREDICATE.fullmatch(operands[0]):
            del operands[0]
        target = _target(name, operands)
        sources = operands if target is None else operands[1:]
        unset = _reads(name, match[2], sources) - written
        if any(
            file == "UR" or ((file, i) == target and name[:4] not in _PARTIAL) for file, i in unset
        ):
            found.append(line.strip())
        if target is not None:
            kind, first = target
            written |= {(kind, first + i) for i in range(_width(name))}
    return found


def misled_products(sass: str) -> list[str]:
    """Warp group products whose operands' places in shared memory are made from memory, arguments or floats.

    The other form of the lost definition: the register that should hold the descriptor has been written, with something
    else. A place in shared memory comes from constants, the thread's number and counters alone. Loops are gone through
    twice, for what a turn leaves behind; a register that was put on the stack is itself when it comes back.
    """
    lines, labels, jumped = sass.splitlines(), {}, set()
    data: Registers = set()
    stacked: set[int] = set()
    found: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if label := _LABEL.match(line):
            labels[label[1]] = at
        match = _INSTRUCTION.match(line)
        if match and _follow(match, data, stacked) and line.strip() not in found:
            found.append(line.strip())
        jump = _JUMP.match(line)
        if jump and jump[1] in labels and at not in jumped:
            jumped.add(at)
            at = labels[jump[1]]
        at += 1
    return found


def _follow(match: re.Match[str], data: Registers, stacked: set[int]) -> bool:
    """Tell which registers hold data after an instruction; True for a product whose descriptors do before it."""
    name, text = match[1], match[2]
    operands = [operand.strip() for operand in text.split(",")]
    while operands and _PREDICATE.fullmatch(operands[0]):
        del operands[0]
    if name.startswith(("STL", "LDL")):
        _follow_stack(name, text, data, stacked)
        return False
    target = _target(name, operands)
    places = [source for source in operands if "gdesc" in source]
    misled = name.startswith("HGMMA") and bool(_reads(name, text, places) & data)
    if target is not None:
        file, first = target
        written = {(file, first + i) for i in range(_width(name))}
        if name.startswith(_DATA) or (_reads(name, text, operands[1:]) & data):
            data |= written
        else:
            data -= written
    return misled


def _follow_stack(name: str, text: str, data: Registers, stacked: set[int]) -> None:
    offset = re.search(r"\[[^]]*?(?:\+(-?0x[0-9a-f]+))?\]", text)
    register = re.search(r"(?<!\[)\bR(\d+)(?![^[]*\])", text)
    if not offset or not register:
        return
    first, place = int(register[1]), int(offset[1] or "0", 16)
    for i in range(4 if ".128" in name else 2 if ".64" in name else 1):
        held: Any = (data, ("R", first + i)), (stacked, place + 4 * i)
        source, target = held if name.startswith("STL") else held[::-1]
        (target[0].add if source[1] in source[0] else target[0].discard)(target[1])


def _target(name: str, operands: list[str]) -> tuple[str, int] | None:
    """The first register that an instruction writes."""
    match = re.fullmatch(r"(U?R)(\d+)", operands[0]) if operands else None
    if match is None or name.startswith(_NO_TARGET):
        return None
    return match[1], int(match[2])


def _width(name: str) -> int:
    """How many registers an instruction writes."""
    if name.startswith("HGMMA"):
        columns = re.search(r"\d+x(\d+)x", name)
        assert columns, name
        return int(columns[1]) // (4 if name.split(".")[2] == "F16" else 2)
    if name.startswith("LDSM"):
        return int(name[-1])
    if name.startswith(("HMMA", "IMMA")) or ".128" in name:
        return 4
    wide = ".64" in name or ".WIDE" in name or (name.startswith("CS2R") and ".32" not in name)
    return 2 if wide else 1


def _reads(name: str, text: str, sources: list[str]) -> Registers:
    """What an instruction reads, as far as its text tells: of vectors the first register, of addresses both."""
    found: Registers = set()
    for source in sources:
        for kind, file, number, pair in _REGISTER.findall(source):
            first, count = int(number), 2 if pair else 1
            if (
                kind == "gdesc"
            ):  # two descriptors of two registers; the second alone with a left side in registers
                left_in_registers = re.search(r"R\d+, R\d+, gdesc", text) is not None
                first, count = (first + 2, 2) if left_in_registers else (first, 4)
            elif file == "UR" and (
                kind == "desc" or (name.endswith(".64") and name[:3] not in _SHARED)
            ):
                count = 2
            found |= {(file, first + i) for i in range(count)}
    return found
