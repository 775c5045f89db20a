"""What an owned vLLM server loads of ours; this folder alone is put on its path, whatever environment it runs in."""
