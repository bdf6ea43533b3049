"""A rank's part of snapshots in files: blocks of all layers, byte by byte.

Where heads have budgets of their own a head's pages lie in other layers' blocks, so
that the blocks of all layers together are what a request holds. Nothing of them is
parsed: going on from a file is going on from a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from vllm.logger import init_logger

from vllm_h2o.attention.pages import clear_blocks, whole_blocks
from vllm_h2o.core.kept_files import METADATA, PARTIAL

if TYPE_CHECKING:
    from vllm_h2o.core.plan import Load, Save

logger = init_logger(f"vllm.{__name__}")

_MOST_WAITING = 2**30
"""Bytes that wait to be written, of a rank: a disk that is slower gets no more."""


class KeptStore:
    """Writes and reads the files of one rank."""

    def __init__(self, layers: Mapping[str, torch.Tensor], rank: int, ranks: int):
        """Begin with nothing to write.

        Args:
            layers: The caches of all layers that evict, by name: see `Pages.view`.
            rank: Of the tensor-parallel ranks, this one's number.
            ranks: How many there are.
        """
        self._layers, self._rank, self._ranks = layers, rank, ranks
        self._writer = ThreadPoolExecutor(1, "h2o-keeps")
        self._waiting: list[tuple[Future[None], int]] = []
        self._said: set[str] = set()

    def save(self, plan: Save) -> None:
        """Copy blocks out of the cache, and have them written; nobody waits for that.

        Args:
            plan: Which blocks, as they are now.
        """
        try:
            self._copy(plan)
        except (RuntimeError, MemoryError) as error:
            self._say(f"a file is not written: {error}")

    def _copy(self, plan: Save) -> None:
        size = sum(
            len(plan.blocks) * whole_blocks(cache)[0].nbytes
            for cache in self._layers.values()
        )
        self._waiting = [(x, n) for x, n in self._waiting if not x.done()]
        if sum(n for _, n in self._waiting) + size > _MOST_WAITING:
            self._say("a file is not written: the disk is slower than what is kept")
            return
        copies, ready = {}, None
        for name, cache in self._layers.items():
            ids = torch.tensor(plan.blocks).to(cache.device, non_blocking=True)
            blocks = whole_blocks(cache)[ids]
            if blocks.is_cuda:
                host = torch.empty_like(blocks, device="cpu", pin_memory=True)
                blocks = host.copy_(blocks, non_blocking=True)
                ready = torch.cuda.Event()
            copies[name] = blocks
        if ready is not None:
            ready.record()
        writing = self._writer.submit(self._write, plan, copies, ready)
        self._waiting.append((writing, size))

    def _write(
        self,
        plan: Save,
        copies: dict[str, torch.Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            content = save(copies, {METADATA: plan.about})
            digest = hashlib.sha256(content).hexdigest()
            own = f"{self._rank}of{self._ranks}"
            path = Path(f"{plan.stem}-{own}-{digest}.safetensors")
            partial = path.with_name(f"{uuid.uuid4().hex}{PARTIAL}")
            try:
                descriptor = os.open(
                    partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
                )
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    os.fsync(file.fileno())
                partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except Exception as error:
            why = getattr(error, "strerror", None) or error
            self._say(f"a file is not written: {why}")

    def _say(self, what: str) -> None:
        """Log something once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("H2O, --h2o-keep-folder: %s", what)

    def load(self, plan: Load) -> bool:
        """Copy a file into blocks.

        Args:
            plan: Which, and where to.

        Returns:
            Whether it was there and whole; else the blocks have been cleared.
        """
        path = Path(plan.paths[self._rank])
        try:
            found = self._read(path, len(plan.blocks))
        except (OSError, ValueError, MemoryError, SafetensorError) as error:
            logger.warning("H2O can not go on from %s: %s", path, str(error))
            for cache in self._layers.values():
                clear_blocks(cache, torch.tensor(plan.blocks).to(cache.device))
            return False
        for name, cache in self._layers.items():
            blocks = found[name]
            ids = torch.tensor(plan.blocks[: len(blocks)])
            ids = ids.to(cache.device, non_blocking=True)
            blocks = blocks.to(cache.device, non_blocking=True)
            whole_blocks(cache).index_copy_(0, ids, blocks)
        return True

    def _read(self, path: Path, most: int) -> dict[str, torch.Tensor]:
        """The blocks of each layer.

        Raises:
            ValueError: They are not as this rank wrote them, or another's.
            OSError: The file can not be read.
        """
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if not path.stem.endswith(f"-{self._rank}of{self._ranks}-{digest}"):
            raise ValueError("it is damaged")
        found = load(content)
        if found.keys() != self._layers.keys():
            raise ValueError("it is of other layers")
        for name, cache in self._layers.items():
            blocks, mine = found[name], whole_blocks(cache)
            alike = blocks.dtype == mine.dtype and blocks.shape[1:] == mine.shape[1:]
            if not alike or not 0 < len(blocks) <= most:
                shapes = json.dumps([[*blocks.shape], [most, *mine.shape[1:]]])
                raise ValueError(f"its blocks are others: {shapes}")
        return found

    def finish(self) -> None:
        """Write what waits, and nothing more."""
        self._writer.shutdown()
