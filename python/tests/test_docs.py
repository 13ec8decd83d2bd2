"""The code of docs/python.md runs, from its top to its bottom."""
import pathlib
import re

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_guide_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    names = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)  # pylint: disable=exec-used
    assert "did you mean 'train.steps'" in capsys.readouterr().out
