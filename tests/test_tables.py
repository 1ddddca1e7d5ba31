"""Text in aligned columns."""

from hf_zero.tables import aligned


def test_columns_are_as_wide_as_their_widest_cell_and_headings_reach_over_them() -> None:
    rows = [["name", "a", "b"], ["a long heading"], ["x", 1, 22], ["short row", 333]]
    assert aligned(rows, "<>", margin=". ").splitlines() == [
        ". name          a    b",
        ". a long heading",
        ". x             1   22",
        ". short row   333",
    ]
    assert aligned([["a", "b", ""], ["long", "c", ""]], between=" | ") == "a    | b |\nlong | c |"
    assert aligned([]) == ""
