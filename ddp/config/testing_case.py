"""What the tests of testing_program share."""

import os

import program_case

PROGRAM = os.path.join(program_case.RUNFILES, "ddp/config/testing_program")


class Case(program_case.ProgramCase):
    PROGRAM = "ddp/config/testing_program"

    def effective(self, *arguments):
        done = self.run_program(*arguments, "--print_config")
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stderr)
        return done.stdout
