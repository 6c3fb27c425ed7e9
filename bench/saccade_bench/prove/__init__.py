"""`saccade prove`: check whether a server mixes up images that a cache could confuse."""
