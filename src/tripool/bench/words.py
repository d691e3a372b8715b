"""Short common English words: most tokenizers have most of them as one token each."""

from __future__ import annotations

_TEXT = """
able after air also and answer area away ball batch bear bed begin best between bird block boat book box bring build
cache can care cat change city clear cold come cook cost count course cross cut day decode deep dog down dress dry
early ease eat end even every expert eye fact family farm father feet field find fire fish flat fly food force found
free from full gave girl glass gold got green group had hand hard have hear heat here hill home hot house hundred if
island just kind know language last laugh lay learn lease leave less letter light line listen live look love machine
make many mark mean men mile mind money moon morning mother move music name need new night north nothing noun number
off old one open order our over page part pattern peer people picture place plan plant point pool pose prefill problem
question rain reach ready record rest river rock round route rule sail saw school second self serve seven shape ship
should side since six sleep small so song south spell star state step stop street study sun surface tail talk tell
test that their then these thing this though thousand through to token took toward travel true turn under until use
very vowel walk war was water week well were what when which white whole will with wood work would year yet young
"""

WORDS = tuple(_TEXT.split())
