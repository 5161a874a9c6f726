"""The vocabulary side of Tailor: slices, profiles, enrichment, their costs.

Stdlib, numpy and drafters.atomic_file; `tokenizers`, `safetensors` and `fontTools` are imported
inside the functions that need them. Never torch, and nothing of the server.

    slice           VocabSlice: which ids a head computes; TensorRT-Edge-LLM's form of them
    slice_cache     SliceCacheIndex: in which rows they lie
    profile         Algorithm 1 of VocabTailor: the static task set T, its report and its file
    enrichment      Enrichment: a task's own tokens as tuples of base ids; how they are mined
    entropy         H_1, H_2 and K80 of a task's outputs
    unicode_blocks  Unicode blocks and the languages written in them
    cost            which fill of T and how many unverified tokens pay
"""
