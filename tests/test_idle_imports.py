import sys

import pytest

from fedmem.machine.idle_imports import without


def test_a_module_is_missing_inside_and_there_afterwards():
    sys.modules.pop("colorsys", None)
    with without("colorsys", "json"):
        with pytest.raises(ImportError):
            import colorsys
        import json  # which was imported before

        assert json.loads("1") == 1
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_after_an_error_it_is_there_too():
    sys.modules.pop("colorsys", None)
    with pytest.raises(RuntimeError), without("colorsys"):
        raise RuntimeError
    import colorsys

    assert colorsys.__name__ == "colorsys"
