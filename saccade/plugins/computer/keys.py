"""Names of keys: Saccade's own, and the spellings in other systems.

    Saccade  OpenAI      X11 (Anthropic)   pyautogui (models)
    enter    ENTER       Return            enter

Keys that are not in this table, such as letters, have the same spelling everywhere.
"""

from __future__ import annotations

from typing import Literal

Spelling = Literal["openai", "x11", "pyautogui"]

_PARTIES: tuple[Spelling, ...] = ("openai", "x11", "pyautogui")
_SPELT = {
    "alt": ("ALT", "alt", "alt"),
    "backspace": ("BACKSPACE", "BackSpace", "backspace"),
    "capslock": ("CAPSLOCK", "Caps_Lock", "capslock"),
    "cmd": ("CMD", "super", "win"),
    "ctrl": ("CTRL", "ctrl", "ctrl"),
    "delete": ("DELETE", "Delete", "delete"),
    "down": ("ARROWDOWN", "Down", "down"),
    "end": ("END", "End", "end"),
    "enter": ("ENTER", "Return", "enter"),
    "esc": ("ESC", "Escape", "esc"),
    "home": ("HOME", "Home", "home"),
    "insert": ("INSERT", "Insert", "insert"),
    "left": ("ARROWLEFT", "Left", "left"),
    "menu": ("MENU", "Menu", "apps"),
    "minus": ("-", "minus", "-"),
    "pagedown": ("PAGEDOWN", "Page_Down", "pagedown"),
    "pageup": ("PAGEUP", "Page_Up", "pageup"),
    "plus": ("+", "plus", "+"),
    "printscreen": ("PRINTSCREEN", "Print", "printscreen"),
    "right": ("ARROWRIGHT", "Right", "right"),
    "shift": ("SHIFT", "shift", "shift"),
    "space": ("SPACE", "space", "space"),
    "tab": ("TAB", "Tab", "tab"),
    "up": ("ARROWUP", "Up", "up"),
    **{f"f{n}": (f"F{n}", f"F{n}", f"f{n}") for n in range(1, 25)},
}
_ALSO = {
    " ": "space",
    "command": "cmd",
    "control": "ctrl",
    "del": "delete",
    "escape": "esc",
    "ins": "insert",
    "meta": "cmd",
    "next": "pagedown",
    "option": "alt",
    "pgdn": "pagedown",
    "pgup": "pageup",
    "prior": "pageup",
    "return": "enter",
    "windows": "cmd",
}


def _plain(key: str) -> str:
    small = key.lower()
    return small.replace("_", "").replace(" ", "") if len(small) > 1 else small


_OURS = {
    **{_plain(each): name for name, spelt in _SPELT.items() for each in (name, *spelt)},
    **_ALSO,
}


def ours(key: str) -> str:
    """Return Saccade's name for a key in any spelling."""
    return _OURS.get(_plain(key), key if len(key) == 1 else key.lower())


def spelt(key: str, spelling: Spelling) -> str:
    """Return a key's name in another spelling. `key` is Saccade's name."""
    named = _SPELT.get(key)
    return key if named is None else named[_PARTIES.index(spelling)]


def read_chord(text: str) -> tuple[str, ...]:
    """Split a string into keys, which are joined by "+" or spaces."""
    joint = "+" if "+" in text.strip("+") else " "
    if text in ("+", " "):
        return (ours(text),)
    return tuple(ours(key) for key in text.split(joint) if key) or (ours(text),)
