"""Makes vLLM's tiered offloading run on a CPU.

vLLM moves blocks between an accelerator and its primary tier with a worker that needs one (CUDA or
XPU). This stands in for that worker only: it copies with memcpy, and is done when it returns. The
scheduler, the connector, the primary tier and everything above it are vLLM's own.

    "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_spec"
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies pages of the engine's cache into chunks of the primary tier and back."""

    def __init__(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._group_refs = caches.group_data_refs
        self._page_bytes = [each.page_size_bytes for each in caches.tensors]
        self._engine = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors
        ]
        self._primary = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._page_bytes
        ]
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """From the engine's cache into the primary tier."""
        return self._move(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """From the primary tier into the engine's cache."""
        return self._move(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last time."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Lets go of the memory."""
        self._primary.clear()
        self._engine.clear()
        self._region.cleanup()

    def _move(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, is_store: bool
    ) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        begun, moved, block_at, chunk_at = time.perf_counter(), 0, 0, 0
        for refs, count, first in zip(
            self._group_refs, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            if count == 0:
                continue
            skipped = first % self._blocks_per_chunk
            for number in range(count):
                block = int(blocks.block_ids[block_at + number])
                chunk, slot = divmod(skipped + number, self._blocks_per_chunk)
                row = int(chunks.chunk_ids[chunk_at + chunk])
                for ref in refs:
                    page = self._page_bytes[ref.tensor_idx]
                    engine = self._engine[ref.tensor_idx][block]
                    primary = self._primary[ref.tensor_idx][row, slot * page : (slot + 1) * page]
                    _ = primary.copy_(engine) if is_store else engine.copy_(primary)
                    moved += page
            block_at += count
            chunk_at += -(-(count + skipped) // self._blocks_per_chunk)
        took = time.perf_counter() - begun
        self._finished.append(TransferResult(job_id, True, moved, took))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with that worker, and without the check for an accelerator."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The one worker of this process."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
