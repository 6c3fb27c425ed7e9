"""English words for random text."""

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    """
    about above across after again against almost along already also always among another answer any area around ask away back
    bank become before began begin behind being best better between beyond board body book both bring brought build built business
    call came car carry case cause center certain change child city class clear close cold come common company complete control cost
    could country course cover cross cut day deep development did different direct does door down draw drive during each early earth
    east easy education effect eight either end energy enough equal even evening event ever every example experience eye face fact
    fall family far fast father feel field figure final find fine fire first five follow food force form found four free friend from
    front full game gave general girl give given glass good government great green ground group grow half hand happen hard head hear
    heat heavy held help here high history hold home horse hot hour house however human hundred idea important inch include increase
    information inside interest island just keep kind king knew know land language large last late law lead learn least leave left
    less letter level life light line list listen little live local long look love low machine made main make many map mark market
    material matter may mean measure meet member might mile mind minute modern moment money month moon more morning most mother mountain
    move much music must name nation natural near need never new next night north nothing notice number object ocean office often once
    only open order other over own page paper part pass past pattern people perhaps period person picture piece place plan plant play
    point policy possible power present problem process product program project public question quick quite rain reach read ready real
    reason record red remember report rest result right river road rock room round rule run same school science sea second see seem self
    sentence service set several shape ship short should show side simple since size sleep slow small social some song soon sound south
    space special stand star start state stay step still stop story street strong study such summer sun sure surface system table take
    talk teach team tell ten test than that their then there these thing think those though thought thousand three through time today
    together told took top toward town trade travel tree true turn type under understand unit until upon usual value very view visit
    voice wait walk wall want warm watch water way week weight west what wheel where whether which while white whole whose why wide
    will wind window winter with within without woman wonder wood word work world would write year young
    """.split()  # noqa: SIM905 (one word per line would be 400 lines)
)
