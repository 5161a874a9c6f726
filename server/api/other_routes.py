"""Where a client of another server finds here what it asked for under a route that is not ours."""

from __future__ import annotations

from collections.abc import Set

_NO_VECTORS = "This server generates text and has no vectors or scores of whole texts"

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
ELSEWHERE = {
    # llama.cpp's server
    "/completion": _COMPLETIONS,
    "/props": "/tokenizer_info and /v1/models",
    "/slots": "/load and /metrics",
    "/apply-template": "/v1/chat/completions/render",
    "/lora-adapters": "/v1/models",
    "/infill": _COMPLETIONS,
    "/v1/health": "/health",
    # vLLM, SGLang, Text Generation Inference
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/server_info": "/version",
    "/get_server_info": "/version",
    "/get_model_info": "/v1/models",
    "/info": "/version and /v1/models",
    "/invocations": _COMPLETIONS,
    "/health_generate": "/ready",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/classify": "/v1/decisions",
    "/v1/classify": "/v1/decisions",
    # Ollama
    "/api/generate": _COMPLETIONS,
    "/api/chat": _CHAT,
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/api/version": "/version",
    # probes of Kubernetes
    "/healthz": "/health",
    "/livez": "/health",
    "/readyz": "/ready",
    # Anthropic
    "/v1/messages": _CHAT,
}
"""Our routes by theirs."""

_VECTORS = frozenset(
    f"{prefix}/{name}"
    for prefix in ("", "/v1", "/v2", "/api")
    for name in ("embedding", "embeddings", "embed", "rerank", "reranking", "score", "pooling")
)


def advice(path: str, ours: Set[str]) -> str:
    """A sentence behind "There is no route": what to ask instead. "" where nothing is known.

    ours: the paths that this server has.
    """
    path = "/" + "/".join(part for part in path.split("/") if part)
    if path in _VECTORS:
        return f" {_NO_VECTORS}."
    path = path.removeprefix("/v1") if path.startswith("/v1/v1/") else path
    found = path if path in ours else "/v1" + path if "/v1" + path in ours else None
    found = found or ELSEWHERE.get(path)
    return f" Ask {found}." if found else ""
