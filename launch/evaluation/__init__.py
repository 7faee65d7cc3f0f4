"""Evaluation on questions or prompts: the modules, from input to output.

  questions.py      a file of questions or prompts -> `Question`s; subsets
  systems.py        calls such as "ngram(max_ngram=2)" -> `System`s that decode
  hf_reference.py   transformers in another process, as a system
  measure.py        groups of questions -> records: every system in turn
  timing.py         a function or a jitted loop -> its seconds
  costs.py          a group of median length -> seconds of rounds and passes
  margins.py        where greedy completions differ -> the margin of the logits
  intervals.py      counts and seconds of units -> ratios with intervals
  summary.py        records -> rows of numbers, by category, task and overall
  page.py           those rows -> a page
  explain.py        rows and costs -> whether it pays, and why; a figure

A *group* is measured at once: at most `batch_size` questions of one category
at one temperature, with all turns, by all systems in random order. Its *record*
is JSON, has everything that the summary needs, and is one line of the journal:
a stopped run resumes with the group that it was working on.
"""
