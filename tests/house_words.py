"""Words that `tests.house` looks for in docstrings."""

RIDDLES = frozenset(["of", "those", "until", "by", "for", "where", "it", "one", "if"])
"""First words of docstrings that depend on their neighbours. dramatiq 2.2.1: 1 % of function docstrings."""

OPENINGS = RIDDLES | {
    *("what", "whatever", "who", "whom", "whose", "whoever", "whether", "that"),
    *("in", "with", "from", "as", "at", "and"),
}
"""First words that no docstring may have; `tests.house` forbids the opening "the same" besides."""

PRONOUNS = frozenset(
    ["what", "who", "whom", "whose", "whoever", "that", "those", "it", "its", "them", "they", "their", "one", "such"]
)
"""Words that stand for a noun; "that" counts as a conjunction too. dramatiq 2.2.1: 2.3 in 100 words."""

_verbs = """
abort accept accumulate acknowledge acquire activate adapt add adjust admit advance aggregate align allocate allow
answer append apply approve arrange ask assemble assert assign associate attach attempt authenticate authorize
average await

back backfill balance be become begin belong bind block boot bound break bring broadcast buffer build bury

cache calculate call cancel cap capture cast catch center centre change check choose chunk claim clamp classify
clean clear clip clone close coalesce collapse collect combine come commit compact compare compile complete compose
compress compute concatenate configure confirm connect construct consume continue contribute convert copy correct
count cover create cut

deal decide declare decode decompress decrease decrypt define delay delete deliver demand derive describe
deserialize detach detect determine die differentiate disable discard disconnect discover dismiss dispatch display
distribute divide do document download drain draw drop dump

emit empty enable encode encrypt end enforce enqueue ensure enter enumerate escape establish estimate evaluate evict
examine exchange exclude execute exit expand expect explain export expose extend extract

fail fetch fill filter finalize find finish fire flatten flush fold follow forbid force forget fork format forward
free freeze fsync fuse

gather generate get give go grant greet group grow guard guess

halt hand handle hash have hear help hide hold

identify ignore implement import include increase increment infer inform inherit initialise initialize inject inline
insert inspect install instantiate interpolate interpret interrupt introduce invalidate invert invoke issue iterate

join judge

keep kill know

label launch leave lend let lift limit link list listen live load locate lock log look lose lower

maintain make map mark mask match measure merge migrate mirror mix modify monitor mount move multiply

name negate negotiate normalise normalize note notify

observe obtain offer offset omit open order overwrite own

pack pad pair parse partition pass patch pause permit permute persist pick pin ping place plan play plot point poll
pop populate post postpone predict prefer prefetch prefill prepare prepend preserve prevent print probe proceed
process produce profile project promise promote propagate protect prove provide publish pull purge push put

quantise quantize query queue quote

raise reach react read rebuild recall receive reclaim recognise recognize recompute reconcile reconnect record
recover reduce refer refill reflect refresh refuse register reissue reject relay release reload remember remove
rename render renew reopen repair repeat replace replay reply report represent request require rerun resend reserve
reset reshape resize resolve respond restart restore restrict resume retain retire retrieve retry return reuse
revoke rewrite roll rotate round route run

sample save say scale scan schedule score search seal see seed select send separate serialize serve set settle
shard shift show shuffle shut sign signal simulate skip sleep slice snapshot solve sort spawn specify split
spread stack stage stand start stay steer step stop store stream strip submit subscribe subtract suggest sum
summarise summarize supervise supply suppress suspend swap switch synchronise synchronize

take tell terminate test throttle throw tokenise tokenize track train transfer transform translate transpose
traverse treat trigger trim truncate try tune turn

unblock undo unfold unlink unload unlock unpack unregister unwrap update upload use

validate verify visit

wait wake walk warm warn watch weigh widen withdraw work wrap write

yield zero
"""
VERBS = frozenset(_verbs.split())
"""Verbs in the imperative, as a function's docstring opens; a missing one is added here."""
