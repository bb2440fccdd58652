"""Print the requirements that pyproject.toml declares, one a line: `requirements.py [EXTRA | --build]`.

An image installs them in a layer of its own, before there is any source to install.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    declared = tomllib.loads(Path("pyproject.toml").read_text())
    match sys.argv[1:]:
        case []:
            lines = declared["project"]["dependencies"]
        case ["--build"]:
            lines = declared["build-system"]["requires"]
        case [extra]:
            lines = declared["project"]["optional-dependencies"][extra]
        case _:
            sys.exit(__doc__)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
