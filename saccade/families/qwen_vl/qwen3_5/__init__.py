"""Qwen3.5: gated delta-rule layers between full-attention layers; Qwen3-VL's vision tower without
its extra levels.
"""
