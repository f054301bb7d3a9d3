"""`foof bench`: what a step, a solve and a given training loss cost, here and elsewhere, in one interleaved run on any machine.

Cases (`cases`) meet methods, ours and peers (`methods`), in measurements (`steps`, `memory`, `loss`, `fisher`). A measurement is a
*unit*; its outcome is one JSON record (`records`), from which tables and pictures are made (`show`). Needs torch alone, and a peer
where it is measured.
"""
