"""Benchmarks of Saccade and of any OpenAI-compatible server, as a separate distribution."""
