"""BatchPrefillWithPagedKVCacheWrapper of flashinfer 0.7 without a GPU."""

from __future__ import annotations

from typing import Any

import torch


class PagedPrefill:
    """It computes in float32, and asserts what flashinfer documents of its arguments."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD" and backend in ("auto", "fa2", "fa3")
        self.num_plans = 0

    def plan(  # flashinfer's own parameters
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        given = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        # What is on the device is copied back by plan, which waits for it.
        assert all(t.dtype == torch.int32 and t.device.type == "cpu" for t in given)
        batch = qo_indptr.shape[0] - 1
        assert paged_kv_indptr.shape[0] == batch + 1 and paged_kv_last_page_len.shape == (batch,)
        for indptr in (qo_indptr, paged_kv_indptr):
            assert int(indptr[0]) == 0 and int(indptr.diff().min()) > 0
        assert int(paged_kv_indptr[-1]) == paged_kv_indices.shape[0]
        last = paged_kv_last_page_len
        assert int(last.min()) >= 1 and int(last.max()) <= page_size
        assert num_qo_heads % num_kv_heads == 0 and causal and disable_split_kv
        self._given = tuple(t.clone() for t in given)
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk
        self._page_size, self._window, self._cap = page_size, window_left, logits_soft_cap
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._types = q_data_type, q_data_type if kv_data_type is None else kv_data_type
        self.num_plans += 1

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        rows, pages, indices, last = self._given
        num_heads, num_kv_heads, head_dim = self._heads
        assert q.shape == (int(rows[-1]), num_heads, head_dim) and q.stride(-1) == 1
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self._page_size, num_kv_heads, head_dim)
            assert (q.dtype, cache.dtype) == self._types
            assert int(indices.max()) < cache.shape[0]
        out = torch.empty(q.shape, dtype=q.dtype)
        for i in range(rows.shape[0] - 1):
            own = indices[int(pages[i]) : int(pages[i + 1])].long()
            num = (own.shape[0] - 1) * self._page_size + int(last[i])
            k, v = (
                cache[own].flatten(0, 1)[:num].float()
                .repeat_interleave(num_heads // num_kv_heads, dim=1)
                for cache in paged_kv_cache
            )  # fmt: skip
            part = slice(int(rows[i]), int(rows[i + 1]))
            scores: Any = torch.einsum("qhd,khd->hqk", q[part].float(), k) * self._scale
            if self._cap is not None and self._cap > 0:
                scores = self._cap * torch.tanh(scores / self._cap)
            row = torch.arange(num - (part.stop - part.start), num)[:, None]
            at = torch.arange(num)
            sees = at <= row
            if self._window >= 0:
                sees &= at >= row - self._window
            shares = torch.softmax(scores.masked_fill(~sees, float("-inf")), dim=-1)
            out[part] = torch.einsum("hqk,khd->qhd", shares, v).to(out.dtype)
        return out
