"""The build; all else about the package stands in setup.cfg."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class FreshBuild(build_py):
    """Copies the package into a folder of its own: setuptools would keep modules of the build
    before, which are gone, and put them into the wheel."""

    def run(self):
        if not self.editable_mode:
            built = Path(self.build_lib, "tp_headloss").resolve()
            if built != Path(__file__).resolve().parent / "tp_headloss":
                shutil.rmtree(built, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": FreshBuild})
