"""`saccade bench published`: run the commands behind published benchmarks, and compare results."""
