"""The words that the demo model is trained to read.

None of them occurs in questions or answers, so that they are always spelled letter by letter.
"""

_LIST = """
    air ant apple arm baby bag ball bank bath bear bed bee bell bike bird boat body bone book box boy bread brick bus
    cake camp car card cat chair city clock cloud coat coin cold corn cow cup dance dark day deer desk dog door dream
    duck dust ear earth egg exit farm fast film fire fish flag floor fly food foot fork fox frog fruit game gate gift
    girl glass goat gold grass hair hand hat hill home honey horse hotel house ice iron jam jazz juice jump key king
    kite lake lamp land leaf lemon light lion lock love lunch map mask milk moon mouse music nail neck nest news night
    nose ocean open oven owl paint panda paper park peace pen phone piano pig pilot pizza plane plant pond queen quiet
    rain river road robot rock roof room rope rose sale salt sand school sea seed sheep ship shoe shop silk sky sleep
    snow soap sock song soup spoon stone stop storm street sugar sun swim table taxi tea tent tiger time tooth town
    toy train tree truck van voice wall warm water wave wind window wolf wood yard zebra zero zoo
"""

KNOWN_WORDS: tuple[str, ...] = tuple(_LIST.split())
