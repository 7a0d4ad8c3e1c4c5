"""nftables through libnftables, in this process: one call per change, each answer checked, never an exec.

libnftables is what `nft` itself is made of, so the language and the transactions are the same. One context, one lock.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import threading
from typing import Any

_LIBRARY = "libnftables.so.1"
_OUTPUT_JSON = 1 << 4


class NftError(OSError):
    """The kernel or the parser refused a change; nothing of that change was made."""


class Nft:
    """One libnftables context. Safe from several threads; calls run one after another."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_LIBRARY)
        library.nft_ctx_new.restype = ctypes.c_void_p
        library.nft_ctx_new.argtypes = [ctypes.c_uint32]
        for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error", "nft_ctx_free"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        library.nft_ctx_free.restype = None
        library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        library.nft_ctx_output_set_flags.restype = None
        for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
            getattr(library, name).restype = ctypes.c_char_p
        library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._library = library
        self._lock = threading.Lock()
        self._context = library.nft_ctx_new(0)
        if not self._context:
            raise NftError("libnftables gives no context")
        library.nft_ctx_buffer_output(self._context)
        library.nft_ctx_buffer_error(self._context)

    def close(self) -> None:
        with self._lock:
            if self._context:
                self._library.nft_ctx_free(self._context)
                self._context = None

    def run(self, text: str, *, as_json: bool = False) -> str:
        """Carry out commands in one transaction and return what they print.

        *Errors*: NftError with nft's own message; then nothing was changed.
        """
        with self._lock:
            if not self._context:
                raise NftError("nft: the context is closed")
            self._library.nft_ctx_output_set_flags(self._context, _OUTPUT_JSON if as_json else 0)
            result = self._library.nft_run_cmd_from_buffer(self._context, text.encode())
            output = self._library.nft_ctx_get_output_buffer(self._context) or b""
            error = self._library.nft_ctx_get_error_buffer(self._context) or b""
        if result != 0:
            raise NftError(f"nft: {error.decode(errors='replace').strip() or 'refused without a message'}")
        return bytes(output).decode(errors="replace")

    def elements(self, table: str, name: str) -> list[Any]:
        """The elements of a set, as nft's JSON has them; [] for an empty set. *Errors*: NftError when there is no such set."""
        listed = json.loads(self.run(f"list set {table} {name}", as_json=True))
        for item in listed["nftables"]:
            if "set" in item:
                return list(item["set"].get("elem", []))
        return []

    def chains(self) -> list[dict[str, Any]]:
        """Every chain as nft's JSON has it: family, table, name, and for base chains hook, prio and policy."""
        listed = json.loads(self.run("list chains", as_json=True))
        return [item["chain"] for item in listed["nftables"] if "chain" in item]

    def tables(self) -> list[str]:
        """`family name` of every table."""
        listed = json.loads(self.run("list tables", as_json=True))
        return [f"{item['table']['family']} {item['table']['name']}" for item in listed["nftables"] if "table" in item]
