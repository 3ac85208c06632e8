"""Somebody else's C++ project: what README shows is installed, built in an empty folder, and run."""

import os
import re

from support import BUILD, SOURCE, ProgramTest, environment, main, run


def readme_block(language):
    with open(os.path.join(SOURCE, "README.md")) as file:
        blocks = re.findall(rf"^```{language}\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"README shows {len(blocks)} blocks of {language}"
    return blocks[0]


class Consumer(ProgramTest):
    def test_readme_s_program_builds_and_trains(self):
        prefix, project = os.path.join(self.folder, "prefix"), os.path.join(self.folder, "project")
        run("cmake", "--install", BUILD, "--prefix", prefix)
        os.mkdir(project)
        program = readme_block("cpp")
        self.assertLessEqual(len(program.splitlines()), 40)
        for name, content in (("train.cpp", program), ("CMakeLists.txt", readme_block("cmake"))):
            with open(os.path.join(project, name), "w") as file:
                file.write(content)
        run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", cwd=project)
        run("cmake", "--build", "build", cwd=project, timeout=400)
        launcher = os.path.join(prefix, "bin", "lockstep")
        result = run(launcher, "run", "-n", 2, "--", "build/train", self.data, cwd=project, env=environment())
        self.assertEqual(result.stdout, readme_block("text"))
        listing = run(launcher, "inspect", os.path.join(project, "net.pt")).stdout
        self.assertRegex(listing, r"(?m)^hidden.weight +float32 +\[128, 784\] +401408$")


if __name__ == "__main__":
    main()
