"""`saccade bench published`: the commands behind published figures, and ours beside these."""
