"""Parts common to engines in front of an external inference server (vLLM, SGLang)."""
