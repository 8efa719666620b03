"""What a file that is not GGUF looks like, so that the error can say what went wrong."""

from __future__ import annotations

HEAD_BYTES = 512

_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGML", b"ggml", b"GGMF", b"GGJT", b"GGLA")
_SIGNATURES = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint", "convert it to GGUF first"),
    (b"FUGG", "a GGUF file with swapped bytes", "convert the model again"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    (b"\xfd7zXZ", "an xz archive", "unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (b"\x7fELF", "an executable", "name the model file"),
    (b"\x89HDF", "an HDF5 file", "convert it to GGUF first"),
    (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` to get the file itself"),
)


def describe(head: bytes) -> tuple[str, str]:
    """Return what the first bytes of a file look like, and what to do about it."""
    for signature, looks_like, action in _SIGNATURES:
        if head.startswith(signature):
            return looks_like, action
    if head[:4] in _OLD_GGML:
        return "an old GGML file", "convert the original model to GGUF"
    if head[:1] == b"\x80" and 2 <= head[1] <= 5:
        return "a Python pickle, perhaps a PyTorch checkpoint", "convert it to GGUF first"
    if _is_safetensors(head):
        return "a safetensors file", "convert it to GGUF first"
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it first"
    if not head.strip(b"\0"):
        return "a file of zero bytes", "the download was not completed: fetch it again"
    return _describe_text(head)


def _is_safetensors(head: bytes) -> bool:
    """A 64-bit header length, then JSON."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100 << 20


def _describe_text(head: bytes) -> tuple[str, str]:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page", "download the file itself: on a hub use its /resolve/ link"
    if start.startswith((b"<?xml", b"<error")):
        return "an XML page", "download the file itself: on a hub use its /resolve/ link"
    if start.startswith((b"{", b"[")):
        return "a JSON text", "name the model file"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return "a text file", "name the model file"
    return f"something else (it starts with {head[:4].hex(' ')})", "name a GGUF file"
