"""Stands in for vLLM 0.32 where it is not installed: what the adapters use of it, and no more.

Names, arguments and meanings are vLLM's; whether they still are is shown by integration/vllm, which
runs the adapters in a real one.
"""

__version__ = "0.32.0"
