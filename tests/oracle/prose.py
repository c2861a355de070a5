"""Text for the goldens, written for them."""

HARBOUR = (
    "The harbour at Veld Point was built for herring, and for a hundred years it had nothing else to do. Boats "
    "left on the evening tide and came back before light, low in the water, and by seven the quay was a floor of "
    "silver that three generations of women gutted, salted and packed into barrels. When the herring went, in a "
    "single bad decade, the town kept the habit of early rising without quite knowing what it was for. People "
    "opened their curtains at five and looked at the empty quay. The harbour master, a tall man called Anders "
    "Roe, went on writing the weather into his ledger twice a day: wind, cloud, the height of the water against "
    "the painted board, and in the last column, where his father had counted boats, a small neat zero.\n\n"
    "In the spring of the year the bridge opened, a woman came down from the university with eleven crates and a "
    "letter. She wanted to measure the tides. Roe told her that the tides had been measured already, and showed "
    "her the ledgers, forty-three of them, bound in blue cloth and smelling of fish. She turned the pages for "
    "most of an afternoon. Then she asked whether she might borrow them, all of them, and whether he knew that "
    "nobody else on this coast had written down the height of the water, twice a day, for eighty-six years. He "
    "said that he had not known, but that somebody had to do it. She laughed, and then she saw that he meant it, "
    "and she stopped.\n\n"
    "The crates held gauges, and the gauges were better than the painted board, but"
)

GARDEN = (
    "A gardener who wants tomatoes before August must begin in the dark of February. Sow the seed in shallow "
    "trays, keep them near a warm wall, and turn them every morning so that the stems grow straight. When the "
    "second pair of leaves has opened, move each plant to a pot of its own, deeper than seems right, since the "
    "buried stem will make roots."
)
