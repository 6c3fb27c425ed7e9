"""`saccade prove`: does a server mix up images that a cache might take for one another?"""
