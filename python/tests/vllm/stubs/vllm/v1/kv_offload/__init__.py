"""Part of the stand-in for vLLM: see its root."""
