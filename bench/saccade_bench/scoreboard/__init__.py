"""Run `prove` on other engines, and write a page of the results."""
