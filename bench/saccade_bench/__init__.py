"""Measurements of Saccade, and of any OpenAI-compatible server: a distribution of its own, beside
the server.
"""
