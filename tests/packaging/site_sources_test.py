"""What docs/site prepares for the site, without Sphinx: the home page, and the pages of headers."""

import os
import re
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import SOURCE, main  # noqa: E402

sys.path.insert(0, os.path.join(SOURCE, "docs", "site"))
import headers  # noqa: E402
import pages  # noqa: E402


def page_of(header):
    return headers.cpp_page(os.path.join(SOURCE, "include/lockstep", header))


class Sources(unittest.TestCase):
    def test_the_home_page_speaks_before_it_lists(self):
        names = {name.removesuffix(".md") for name in os.listdir(os.path.join(SOURCE, "docs")) if name.endswith(".md")}
        before, _, lists = pages.index(names).partition("```{toctree}")
        paragraphs = [part for part in before.split("\n\n")[1:] if part.strip()]
        self.assertEqual(len(paragraphs), 2, paragraphs)
        links = re.findall(r"\]\((\w+)\.md\)", before)
        self.assertLessEqual({"readme", "from_pytorch_ddp", "common_mistakes", "errors"}, set(links))
        self.assertLessEqual(set(links) - {"readme"}, names)
        self.assertIn("\nin_which_order\n", lists)

    def test_a_class_shows_what_it_inherits(self):
        page = page_of("distributed_data_parallel.h")
        inherited = page.partition("### Inherited from Replica\n")[2]
        for name in ("no_sync", "accumulate", "join", "refresh", "clip_grad_norm", "skip_step", "stats", "register_comm_hook"):
            self.assertIn(f"- [`{name}`](replica.h.md#replica)", inherited)
        self.assertIn(": Runs `body`, a loop over inputs of which some ranks may have fewer.\n", inherited)
        self.assertNotIn("[`Replica`](replica.h.md#replica):", inherited)
        self.assertIn("\n## Replica\n", page_of("replica.h"))
        loader = page_of("data_loader.h").partition("### Inherited from LoaderBase\n")[2]
        for name in ("epochs", "set_epoch", "stats", "state_dict"):
            self.assertIn(f"- [`{name}`](loader.h.md#loaderbase)", loader)

    def test_members_are_read_with_the_first_sentence_of_their_comment(self):
        code = """class A : public B {
 public:
  explicit A(int n);
  ~A();
  A& operator=(A&&) = delete;
  /// Does this, in
  /// two lines. And more.
  [[nodiscard]] std::function<int(int)> one(std::vector<int> values = {1, 2});
  /// Numbers 0 .. n: as they are.
  int two() const { return n_; }
  void three();
  using Four = int;
 private:
  void five();
};"""
        self.assertEqual(headers.public_members(code), [("A", ""), ("one", "Does this, in two lines."), ("two", "Numbers 0 .. n."), ("three", "")])


if __name__ == "__main__":
    main()
