"""Drawn images and questions with one right answer: accuracy runs ask them, and `train/` trains the
demo model on them.
"""
