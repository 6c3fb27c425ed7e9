"""What measures Saccade, and any OpenAI-compatible server: a distribution of its own, beside the
server.
"""
