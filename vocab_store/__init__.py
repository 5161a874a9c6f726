"""The vocabulary side of Tailor: slices, profiles, enrichment, their costs.

Stdlib, numpy and drafters.atomic_file; `tokenizers`, `safetensors` and `fontTools` are imported
inside the functions that need them. Never torch, and nothing of the server.

    slice           VocabSlice and SliceCacheIndex: which ids a head computes, and in which rows
    profile         Algorithm 1 of VocabTailor: the static task set T, its report and its file
    enrichment      Enrichment: a task's own tokens as tuples of base ids (TASC-ft)
    enrich          Algorithm 1 of TASC-ft: which output n-grams become tokens
    entropy         H_1, H_2 and K80 of a task's outputs
    unicode_blocks  Unicode blocks and the languages written in them
    cost            which fill of T and how many unverified tokens pay
    edge_llm        the vocab_map.safetensors form of TensorRT-Edge-LLM
"""
