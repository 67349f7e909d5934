# SPDX-License-Identifier: Apache-2.0
"""A random grammar of telephone speech: prompts, digits, amounts, dates, times, names, places and commands.

Every slot is filled uniformly and a quarter of the sentences are words in random order, so that the text cannot be
guessed without hearing it. Sentences are lower case, numbers in words. One sentence in fifty, by a hash of its text,
is held out: it may be tested on and never occurs in training.

    python sentences.py --count 10 --seed 1
"""

from __future__ import annotations

import argparse
import random
import re
import zlib

FIRST_NAMES = """aaron adam adrian alan albert alex alison andrew anna anthony barbara bernard carl carla carmen
caroline charles charlotte chris clara craig daisy deborah dennis diana dorothy dylan edith eleanor emma eric ethan
eva evelyn frances gabriel gary gavin george gerald gina gloria greg harold heather henry holly howard hugo ian ida
irene isaac isabel ivan jane janet jean jeffrey joel jonathan joshua joyce judith justin kyle lauren lee lewis liam
linda logan luke malcolm margaret marie martin maurice max megan molly nancy nicole noah norman patricia paula peter
raymond rebecca richard robert robin roger ruby russell samantha scott sheila simon stella stephen stuart theodore
timothy tina todd trevor valerie vanessa violet virginia walter wanda warren wendy wesley william yvonne
zachary""".split()

LAST_NAMES = """armstrong barnes barrett bennett blackwell bowman bryant burton butler campbell carpenter clayton
collins cooper cox crawford cunningham dalton davies dixon donovan erickson flynn fowler franklin garcia gardner
gibson graves greene hansen harding harrington harrison hartman harvey hawkins hayes henderson higgins hoffman holland
horton houston hudson hughes hunter hutchinson ingram jacobs jenkins jensen johnson kaufman keller lancaster lindsay
livingston lopez mackenzie manning marshall martinez mccarthy mcdonald miller montgomery moore morrison murphy newman
o'connor payne pearson peterson phillips preston ramsey reynolds richards roberts robinson rodriguez rogers rossi
sanders saunders schneider shaw shepherd simpson sinclair smith stevenson sutherland thompson tucker turner wagner
walker wallace watkins watson webb webster wheeler wilkinson williams wilson woodward""".split()

PLACES = """aberdeen alabama albany arkansas atlanta auckland austin australia austria baltimore barcelona beijing
belfast berlin brighton brussels california cambridge canada canberra cardiff chicago china cincinnati cleveland
cologne colombia colorado columbus connecticut copenhagen croatia cuba cyprus delhi denmark detroit dublin dundee
england estonia florida frankfurt geneva germany ghana glasgow guatemala hamburg hawaii hungary iceland idaho india
iowa ireland istanbul italy jamaica kansas kenya leicester louisiana madrid maine malta manchester massachusetts
mexico miami michigan milan milwaukee minnesota mississippi missouri montana morocco naples nepal netherlands nigeria
norway nottingham oregon orlando perth peru philadelphia phoenix prague richmond romania sacramento scotland seattle
sheffield singapore slovakia slovenia spain stockholm sydney taiwan toronto turkey uganda ukraine utah venice vermont
wales warsaw york zurich""".split()

STREETS = """acorn birch broadway castle cathedral cedar chestnut church clifton college elm factory forest hazel
hillside juniper laurel maple market museum oak orchard park queen railway ridge river riverside spring station
sycamore temple victory walnut willow windmill""".split()

NOUNS = """address agent alarm answer apartment apple article balloon banana band bank battery beach bicycle bird
blanket book bottle box bread breakfast broker budget building business butter button cable calendar captain card cat
chair cheese chicken child cinema circle coat coffee computer concert contract copper corner cotton credit customer
dentist department deposit desk dinner doctor dog door dragon east elephant email envelope extension family feather
flight folder fridge friend furniture garage gate ghost gift glass glove goat guitar hammer history holiday horse
hospital human ice invoice island jacket journey jungle kettle key kitten ladder language leather letter library lion
lunch machine mailbox manager map medicine meeting message milk minister mirror money monkey moon morning mountain
mouse music neighbour night notebook number nurse oil onion orange oven owner package page painter palace parent
partner party passenger password pasta pepper person piano picture pillow pilot plastic plate pocket poem potato
present president price prince prison prize problem program project puzzle radio rain record refund report rice robot
rocket roof room rope salad sandwich science season secret service shadow sheep shelf ship shirt shop shoulder silver
sister sock soldier soup spider spoon stadium stamp statue stone storm story student subject sugar summer sunday
swimmer table tailor teacher telephone television tennis tent theatre thunder ticket tiger tooth train tree trousers
truck tunnel umbrella uncle uniform village volcano wallet water weather website wedding west wheel whistle wolf woman
world writer zebra""".split()

VERBS = """accept add announce arrange ask bake borrow break bring buy carry charge check choose clean close collect
confirm connect copy count cover create delete describe destroy disable discuss draw drink drop edit enable enter
fetch find finish follow forget forward help hide hold import increase inspect invite leave lift lock lower mix move
notice open organise pack paint pause pay pick play please polish press print promise protect publish pull push raise
read receive release remember rent repeat replace request rescue return review save sell send share skip sort speak
start stop take throw touch transfer translate try turn upload visit wait watch welcome write""".split()

ADJECTIVES = """active ancient angry available bitter brave bright brown busy calm careful cheap clever cold common
cool correct crazy current dangerous deep delicate dirty double easy elegant expensive extra fast final flat frozen
funny giant golden good grey heavy helpful high hollow honest hot huge hungry important invalid late lazy local lonely
long loud lucky nervous noisy old perfect pink pleasant polite popular possible powerful proud public purple quick
quiet rare red rough round royal short simple single slow smooth soft special square strange strong tasty thick tiny
tropical ugly urgent useful warm wet wide wooden""".split()

MONTHS = "january february march april may june july august september october november december".split()
WEEKDAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
DIGITS = "zero one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = """first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth
fifteenth sixteenth seventeenth eighteenth nineteenth twentieth thirtieth""".split()
CURRENCIES = "dollars euros pounds cents francs rupees".split()
UNITS = "minutes hours days weeks months years kilometres miles metres degrees percent seconds".split()
ADVERBS = """again always carefully certainly exactly forever immediately later never now often outside quickly quietly
rarely slowly sometimes soon today together tomorrow tonight twice yesterday""".split()

# <slot> is filled from RULES or from a list above; other words stand as they are.
TEMPLATES = """
please press <number> to speak to <first> <last>
press <digit> for <noun> or <digit> for <noun>
for <noun> press <digit>
you have <number> new <noun> messages
your <noun> will <verb> on <weekday> at <time>
please enter your <digit> digit <noun> number followed by the pound key
the number you have dialed <digits> is not in service
the <adjective> <noun> of <first> <last> is <digits>
call <first> <last> at <digits>
call <digits>
my phone number is <digits>
extension <digits>
your account balance is <amount>
the total is <amount>
please transfer <amount> to <first> <last>
a payment of <amount> is due on <date>
the <noun> costs <amount> in <place>
i paid <amount> for the <adjective> <noun>
today is <weekday> <date>
the meeting with <first> is on <date> at <time>
it is <time> in <place>
set an alarm for <time>
wake me up at <time> on <weekday>
remind me to <verb> the <noun> at <time>
my name is <first> <last>
this is <first> <last> from <place>
<first> <last> was born on <date> in <place>
may i speak to <first> <last> please
<first> and <first> live in <place>
send the <noun> to <number> <street> street in <place>
my address is <number> <street> avenue <place>
turn left on <street> road and right on <street> lane
the train from <place> to <place> leaves at <time>
the flight to <place> leaves from gate <number>
book a <noun> from <place> to <place> on <date>
how far is <place> from <place>
the weather in <place> is <adjective> and <adjective>
it is <number> degrees in <place>
<verb> the <adjective> <noun>
<verb> the <noun> and <verb> the <noun>
<adverb> <verb> <number> <adjective> <noun> boxes
please <verb> my <adjective> <noun> <adverb>
do not <verb> the <noun> near the <adjective> <noun>
can you <verb> the <noun> for <first>
who will <verb> the <adjective> <noun> <adverb>
where is the <adjective> <noun> from <place>
the <noun> is <adjective> but the <noun> is <adjective>
a <adjective> <noun> and a <adjective> <noun>
wait <number> <unit>
<number> <unit> and <number> <unit>
the <ordinal> <noun> is in the <adjective> <noun>
this is your <ordinal> <noun> in <number> <unit>
<first> wants to <verb> a <noun> in <place>
mister <last> and doctor <last> will <verb> the <noun>
ask <first> to <verb> the <noun> before <time>
hello <first> how are you
good afternoon <first> <last> speaking
thank you for calling the <noun> <noun>
sorry nobody is able to take your call right now
goodbye and have a <adjective> <weekday>
all our operators are busy with other callers
your estimated waiting time is <number> <unit>
leave your name after the beep
yes i would like <number> <noun> tickets
no i cannot <verb> that <adjective> <noun>
""".strip().splitlines()
SALADS = """
<noun> <noun> <noun>
<adjective> <noun> <verb> <adverb>
<any> <any> <any> <any>
<any> <any> <any> <any> <any> <any>
<any> <any> <any> <any> <any>
<first> <last> <place>
<last> <last> <last>
<place> <street> <ordinal> <place>
<verb> <verb> <noun> <adjective>
<digits>
<amount>
<date>
""".strip().splitlines()

LISTS = {
    "first": FIRST_NAMES, "last": LAST_NAMES, "place": PLACES, "street": STREETS, "noun": NOUNS, "verb": VERBS,
    "adjective": ADJECTIVES, "weekday": WEEKDAYS, "digit": DIGITS, "ordinal": ORDINALS, "unit": UNITS,
    "adverb": ADVERBS,
}  # fmt: skip
WORDS = sorted(set().union(*LISTS.values(), MONTHS, TEENS, TENS, CURRENCIES))
_FIXED = {word for line in TEMPLATES for word in re.sub(r"<\w+>", " ", line).split()}
VOCABULARY = (
    frozenset(WORDS) | _FIXED | {"hundred", "thousand", "point", "o'clock", "am", "pm", "half", "past", "quarter"}
)
VOCABULARY |= {"to", "of", "the", "and"}


def _number(rng: random.Random, low: int = 1, high: int = 99) -> str:
    value = rng.randint(low, high)
    if value < 20:
        return (DIGITS + TEENS)[value]
    tens, ones = divmod(value, 10)
    return TENS[tens - 2] + (f" {DIGITS[ones]}" if ones else "")


def _amount(rng: random.Random) -> str:
    currency = rng.choice(CURRENCIES)
    form = rng.randrange(4)
    if form == 0:
        return f"{_number(rng, 2)} {currency}"
    if form == 1:
        return f"{_number(rng, 1, 9)} hundred {_number(rng)} {currency}"
    if form == 2:
        return f"{_number(rng)} thousand {_number(rng, 1, 9)} hundred {currency}"
    return f"{_number(rng)} point {rng.choice(DIGITS)} {rng.choice(DIGITS)} {currency}"


def _date(rng: random.Random) -> str:
    ordinal = rng.choice(ORDINALS) if rng.random() < 0.7 else f"twenty {rng.choice(ORDINALS[:9])}"
    month = rng.choice(MONTHS)
    return f"{month} {ordinal}" if rng.random() < 0.5 else f"the {ordinal} of {month}"


def _time(rng: random.Random) -> str:
    hour, form = (DIGITS + TEENS)[rng.randint(1, 12)], rng.randrange(4)
    if form == 0:
        return f"{hour} o'clock"
    if form == 1:
        return f"{hour} {_number(rng, 10, 59)} {rng.choice(['am', 'pm'])}"
    if form == 2:
        return f"half past {hour}"
    return f"quarter {rng.choice(['past', 'to'])} {hour}"


RULES = {
    "number": _number,
    "amount": _amount,
    "date": _date,
    "time": _time,
    "digits": lambda rng: " ".join(rng.choice(DIGITS) for _ in range(rng.choice([3, 4, 5, 6, 7, 7]))),
    "any": lambda rng: rng.choice(WORDS),
}


def sentence(rng: random.Random) -> str:
    """One random sentence: words of a-z and apostrophes, separated by single spaces."""

    def fill(match: re.Match) -> str:
        slot = match.group(1)
        return RULES[slot](rng) if slot in RULES else rng.choice(LISTS[slot])

    return re.sub(r"<(\w+)>", fill, rng.choice(SALADS if rng.random() < 0.25 else TEMPLATES))


def is_held_out(text: str) -> bool:
    """Whether a sentence belongs to the test side of the split."""
    return zlib.crc32(text.encode()) % 50 == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    for _ in range(arguments.count):
        print(sentence(generator))
