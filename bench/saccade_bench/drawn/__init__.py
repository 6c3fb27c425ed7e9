"""Drawn images, and questions about them with one correct answer. Accuracy runs ask these, and
`train/` trains the demo model on them.
"""
