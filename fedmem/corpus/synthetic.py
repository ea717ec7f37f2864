"""Generates a synthetic corpus: seeded, medical-sounding English in the formats of the four tasks.

Every sentence is a form with slots, and every slot has a list of thirty words or more. A model therefore learns the
grammar quickly, each text is unique, and a run of more than 50 characters hardly ever occurs twice by chance. A row has
a topic: its first sentence, its output and its question use the same words. Half of the sites, findings and treatments
of a group are words of that group alone. No text is copied from any source, and the statements have no meaning.

The module does not depend on clients, splits or models. The public part (for the base model) shares no sentence with
any private corpus of any seed: a digest of the sentence decides to which of the two it belongs.
"""

import random
from collections.abc import Callable
from hashlib import blake2b

import pandas as pd

from fedmem.config.vocabulary import TASKS

COLUMNS = ["id", "instruction", "input", "output", "group"]

# Sentences are added until the text reaches a length drawn from this to 4/15 more. The last sentence exceeds it: 60 to
# 90 words.
INPUT_WORDS = 60

# Words that all groups use.
SHARED = {
    "quality": "dull sharp steady mild severe sudden slow deep faint brief constant stubborn nightly hidden diffuse "
    "painful harmless chronic acute rare odd subtle violent rapid heavy light dry warm cold strange frequent fresh "
    "lasting minor major patchy fading rising silent early late common bitter uneven sticky bright rough mobile",
    "manner": "daily weekly prompt careful cautious strict gentle repeated oral topical regular guided intensive "
    "routine delayed combined planned optional cheap private partial hourly sterile modern simple standard extra "
    "quick thorough patient monthly shared costly trusted proven novel",
    "people": "farmers teachers nurses drivers painters bakers pilots sailors dancers students lawyers miners cooks "
    "tailors clerks gardeners plumbers singers guards athletes widowers twins veterans toddlers infants mothers "
    "fathers retirees swimmers cyclists runners climbers carpenters weavers barbers janitors musicians typists "
    "waiters fishermen potters welders masons jockeys coaches hikers priests judges",
    "verb": "eased followed preceded outlasted delayed masked mirrored resembled replaced triggered shortened softened "
    "doubled halved limited revealed explained matched countered reversed stopped renewed provoked reduced raised "
    "slowed joined crossed lifted shifted signaled blurred lightened relieved soothed disturbed controlled prevented "
    "restored weakened tracked cleared confirmed worsened copied ended hastened broke",
    "activity": "breakfast lunch dinner supper swimming cycling gardening walking running dancing sleep work school "
    "travel winter summer spring autumn exercise yoga singing reading driving cleaning cooking hiking skating rowing "
    "fishing sewing painting climbing shopping bathing prayer chores meetings exams harvest overtime nightfall "
    "daybreak weekends tennis chess holidays church noon",
    "place": "clinic hospital ward hospice school factory airport harbor barracks shelter library stadium prison farm "
    "market bakery depot quarry embassy theater museum college laundry shipyard sawmill brewery foundry station "
    "hostel campus chapel garage",
    "site": "arm leg back neck wrist ankle elbow shoulder hand foot thumb palm heel shin calf thigh waist side belly "
    "cheek chin forehead nape groin",
    "finding": "pain swelling soreness stiffness itching cramps bleeding bruises weakness fatigue nausea redness "
    "pressure tightness dizziness tenderness fever chills sweating pallor thirst twitching heaviness burning",
    "treatment": "rest massage ice aspirin stretching surgery bandages fluids vitamins fasting exercise creams herbs "
    "vaccines tablets drops syrup injections compresses splints tea heat hypnosis counseling",
}

# Words that only one group uses: sites; findings; treatments.
GROUPS = {
    "cardiology": "heart aorta valve atrium ventricle septum artery pulse chest vein sternum apex; "
    "palpitations murmurs angina flutter arrhythmia clots stenosis infarcts fainting emboli congestion ischemia; "
    "statins stents bypass pacemakers digoxin warfarin nitrates ablation heparin catheters amlodipine diuretics",
    "neurology": "brain nerve cortex spine cerebellum scalp temple thalamus brainstem skull hippocampus midbrain; "
    "migraine seizures tremor numbness vertigo strokes palsy aphasia tingling neuropathy spasms amnesia; "
    "levodopa valproate triptans gabapentin shunts baclofen botox phenytoin donepezil lithium ketamine biofeedback",
    "orthopedics": "knee hip femur tibia pelvis meniscus tendon ligament collarbone kneecap fibula humerus; "
    "fractures sprains arthritis bursitis limping locking tendinitis scoliosis bowing dislocation gout grinding; "
    "casts crutches traction plates screws braces grafts insoles walkers slings pins cortisone",
    "dermatology": "skin eyelid nail follicle armpit knuckle fingertip dermis earlobe hairline cuticle lip; "
    "rash eczema acne psoriasis blisters warts hives scabies peeling moles scaling dandruff; "
    "retinoids emollients lasers zinc peels sunscreen antifungals lotions tar shampoo phototherapy freezing",
    "gastroenterology": "stomach liver colon gullet pancreas bowel rectum gallbladder appendix duodenum navel ileum; "
    "heartburn ulcers bloating reflux jaundice polyps diarrhea constipation hiccups hernias colic gastritis; "
    "antacids fiber probiotics laxatives enemas omeprazole broths banding lavage charcoal ginger bismuth",
    "pulmonology": "lung bronchus windpipe diaphragm pleura rib alveolus lobe airway larynx mediastinum hilum; "
    "asthma wheezing coughing pneumonia sputum apnea phlegm bronchitis fibrosis choking croup pleurisy; "
    "inhalers oxygen steroids nebulizers salbutamol drains ventilation expectorants zileuton masks codeine salmeterol",
    "ophthalmology": "eye retina cornea iris lens pupil macula sclera orbit lash conjunctiva fovea; "
    "cataracts glaucoma floaters squinting myopia glare styes tearing blindness halos pinkeye drusen; "
    "glasses timolol patches lutein implants atropine contacts prisms eyewash laser vitrectomy pilocarpine",
    "nephrology": "kidney bladder ureter nephron urethra glomerulus prostate flank calyx tubule fistula sphincter; "
    "stones proteinuria edema dribbling anuria cystitis urgency nephritis uremia leakage retention gravel; "
    "dialysis citrate transplants potassium furosemide alkali binders lithotripsy cranberries carbonate stenting salts",
    "dentistry": "tooth gum jaw molar tongue palate incisor canine enamel pulp socket crown; "
    "caries toothache plaque gingivitis abscesses tartar grinders erosion halitosis sores bruxism crowding; "
    "fillings flossing fluoride dentures sealants veneers brushing mouthwash retainers aligners clove extractions",
    "endocrinology": "thyroid pituitary adrenal hormone gland ovary testis thymus pineal islet hypothalamus goiter; "
    "diabetes obesity hirsutism acidosis cravings myxedema flushing hunger tetany gigantism ketosis wasting; "
    "insulin metformin iodine thyroxine estrogen pumps glucagon calcium dieting cortisol testosterone semaglutide",
    "otology": "ear eardrum cochlea nostril sinus throat tonsil adenoid earwax stapes vestibule anvil; "
    "tinnitus deafness earache snoring hoarseness otitis sneezing nosebleeds sinusitis laryngitis ringing echoes; "
    "grommets sprays lozenges saline gargling decongestants cochleas earplugs steam menthol antihistamines syringing",
    "hematology": "blood marrow spleen platelet plasma node lymph capillary serum hemoglobin clone stroma; "
    "anemia leukemia purpura bleeds hemophilia lymphoma petechiae thrombosis sickling neutropenia myeloma cytopenia; "
    "iron folate transfusions chemotherapy chelation rituximab phlebotomy cobalamin interferon rays busulfan donors",
}

# Sentence forms by task. Those of classification are in LABELS: a text uses the forms of its label alone.
STUDY = (
    "In {manner} trials, {people} with {quality} {finding} of the {site} chose {treatment}.",
    "Among {people}, {manner} {treatment} {verb} {quality} {finding} after {activity}.",
    "The {quality} {finding} of the {site} {verb} {manner} {treatment} before {activity}.",
    "After {activity}, {treatment} {verb} the {quality} {finding} in {people}.",
    "At the {place}, {people} on {treatment} had {quality} {finding} during {activity}.",
    "Neither {treatment} nor {activity} {verb} {finding} of the {site} among {people}.",
)

FORMS = {
    "summarization": STUDY,
    "qa": STUDY,
    "dialog": (
        "My {site} has had {quality} {finding} since {activity} at the {place}.",
        "I tried {manner} {treatment} after {activity}, but {quality} {finding} {verb} it.",
        "Then {quality} {finding} {verb} my {activity}, and {treatment} helped the {site}.",
        "Two {people} from the {place} praised {manner} {treatment} for {finding}.",
        "During {activity} the {finding} near my {site} turned {quality} despite {treatment}.",
        "Before {activity}, {manner} {treatment} {verb} the {quality} {finding}.",
    ),
}

LABELS = {
    "background": (
        "Often {quality} {finding} of the {site} troubles {people} during {activity}.",
        "Many {people} at the {place} trust {manner} {treatment} against {finding}.",
    ),
    "methods": (
        "We gave {people} {manner} {treatment} for {quality} {finding} before {activity}.",
        "Staff of the {place} scored {quality} {finding} of the {site} after {activity}.",
    ),
    "results": (
        "With {manner} {treatment}, {quality} {finding} {verb} {activity} in {people}.",
        "After {activity} the {quality} {finding} of the {site} {verb} {treatment}.",
    ),
    "conclusions": (
        "Thus {people} with {quality} {finding} should prefer {manner} {treatment}.",
        "For {finding} of the {site}, {manner} {treatment} suits {people} before {activity}.",
    ),
}

INSTRUCTIONS = {
    "summarization": "Write the title of this abstract.",
    "dialog": "Answer as a doctor.",
    "classification": f"Which section is this from: {', '.join(LABELS)}?",
}

QUESTION = "Does {manner} {treatment} help {people} with {quality} {finding} of the {site}?"

OUTPUTS = {
    "summarization": ("How {manner} {treatment} {verb} {quality} {finding} of the {site} in {people}.",),
    "dialog": (
        "Your {quality} {finding} near the {site} calls for {manner} {treatment}.",
        "Please avoid {activity}, and visit the {place} when {finding} comes back.",
    ),
    "qa": ("Yes, {manner} {treatment} {verb} {quality} {finding} of the {site} in {people} at the {place}.",),
}

# One string per slot above keeps the lists readable; a slot of a group is drawn from both lists (see _words).
WORDS = {slot: words.split() for slot, words in SHARED.items()}

GROUP_WORDS = {
    group: dict(zip(("site", "finding", "treatment"), (part.split() for part in text.split(";")), strict=True))
    for group, text in GROUPS.items()
}


def make_corpus(
    task: str,
    n_groups: int,
    rows_per_group: int,
    seed: int,
    repeated_sentences: float = 0.0,
    repeated_texts: float = 0.0,
    input_words: int = INPUT_WORDS,
) -> pd.DataFrame:
    """Make a private corpus: `n_groups` times `rows_per_group` rows of id, instruction, input, output, group.

    task: summarization, dialog, qa or classification.
    n_groups: number of medical groups, 1 to 12, taken in the order of GROUPS.
    rows_per_group: rows of each group, at least 1.
    seed: any integer; it decides all draws.
    repeated_sentences: share of the rows, 0 to 1, in whose input one sentence is replaced by another row's first one.
    repeated_texts: share of the rows, 0 to 1, that are copies of another row except for id and group.
    input_words: words of an input, 10 to 2000; an input has up to a half more (60 to 90 by default).

    Without repetition no two rows share a sentence of input or output. The instruction is the task's; in qa it is the
    row's own question. A row depends on the task, its group, its number in the group and the seed, not on the number
    of other rows. Raises ValueError when an argument is out of its range.
    """
    _check(task, n_groups, rows_per_group, {"sentences": repeated_sentences, "texts": repeated_texts}, input_words)
    taken: set[str] = set()
    # Each row has its own generator, so that it does not depend on the number of rows. A string seeds Random by its
    # SHA-512, which is the same in every process; hash() is not.
    rows = [
        _row(task, group, random.Random(f"{seed} {task} {group} {number}"), _is_private, taken, input_words)
        | {"id": f"{task}-{group}-{number:05d}", "group": group}
        for group in list(GROUPS)[:n_groups]
        for number in range(rows_per_group)
    ]
    _copy(rows, repeated_texts, random.Random(f"{seed} {task} copy"))
    _repeat(rows, repeated_sentences, random.Random(f"{seed} {task} repeat"))  # last: a copy would overwrite it
    return pd.DataFrame(rows, columns=COLUMNS)


def public_texts(n_rows: int, seed: int) -> pd.DataFrame:
    """Make `n_rows` public rows with the columns of `make_corpus`, the four tasks in turn, the groups drawn at random.

    They share no sentence with any row of `make_corpus`, for any pair of seeds.
    """
    draw = random.Random(f"{seed} public")
    taken: set[str] = set()
    rows = []
    for number in range(n_rows):
        group = draw.choice(list(GROUPS))
        row = _row(TASKS[number % len(TASKS)], group, draw, lambda sentence: not _is_private(sentence), taken)
        rows.append(row | {"id": f"public-{number:06d}", "group": group})
    return pd.DataFrame(rows, columns=COLUMNS)


def sentences(text: str) -> list[str]:
    """Split a synthetic text into its sentences. The forms use full stops and question marks only at sentence ends."""
    return [part.strip() for part in text.replace(".", ".\n").replace("?", "?\n").split("\n") if part.strip()]


def _row(
    task: str,
    group: str,
    draw: random.Random,
    allowed: Callable[[str], bool],
    taken: set[str],
    input_words: int = INPUT_WORDS,
) -> dict:
    """Draw one row of sentences that are `allowed` and not in `taken`, and add them to `taken`."""
    # The label is drawn for every task: dropping the draw for the others would change their corpora.
    label = draw.choice(list(LABELS))
    forms = LABELS[label] if task == "classification" else FORMS[task]
    topical = [forms[draw.randrange(len(forms))], *OUTPUTS.get(task, ()), *([QUESTION] if task == "qa" else ())]
    while True:  # redrawn as a whole, because the topical sentences must use the same words
        topic = _words(group, draw)
        first, *rest = [form.format(**topic) for form in topical]
        if all(allowed(sentence) and sentence not in taken for sentence in (first, *rest)):
            break
    body, n_words = [first], draw.randint(input_words, input_words + 4 * input_words // 15)
    while len(" ".join(body).split()) < n_words:
        sentence = draw.choice(forms).format(**_words(group, draw))
        if allowed(sentence) and sentence not in taken and sentence not in body:
            body.append(sentence)
    taken.update(body, rest)
    question = rest.pop() if task == "qa" else INSTRUCTIONS[task]
    return {"instruction": question, "input": " ".join(body), "output": " ".join(rest) or label}


def _words(group: str, draw: random.Random) -> dict[str, str]:
    """Draw a word for every slot; half of the draws for site, finding and treatment take the group's own words."""
    own = GROUP_WORDS[group]
    return {slot: draw.choice(own[slot] if slot in own and draw.random() < 0.5 else WORDS[slot]) for slot in WORDS}


def _is_private(sentence: str) -> bool:
    # A digest, because Python's hash() of a string differs from process to process.
    return blake2b(sentence.encode(), digest_size=1).digest()[0] % 2 == 1


def _copy(rows: list[dict], share: float, draw: random.Random) -> None:
    """Turn a share of the rows into copies of rows that are not copies themselves; each keeps its id and group."""
    # at least one row must remain as the original, even with a share of 1
    receivers = set(draw.sample(range(len(rows)), min(round(share * len(rows)), len(rows) - 1)))
    givers = [row for number, row in enumerate(rows) if number not in receivers]
    for number in sorted(receivers):  # the draws below must not depend on the order of a set
        rows[number] |= {key: value for key, value in draw.choice(givers).items() if key not in ("id", "group")}


def _repeat(rows: list[dict], share: float, draw: random.Random) -> None:
    """Replace, in a share of the rows, one sentence after the first by the first sentence of another row."""
    first = [sentences(row["input"])[0] for row in rows]
    for receiver in draw.sample(range(len(rows)), round(share * len(rows))):
        body = sentences(rows[receiver]["input"])
        giver = draw.choice([number for number in range(len(rows)) if number != receiver])
        # from 1: a row's first sentence holds the topic that its output repeats
        body[draw.randrange(1, len(body))] = first[giver]
        rows[receiver]["input"] = " ".join(body)


def _check(task: str, n_groups: int, rows_per_group: int, repeated: dict[str, float], input_words: int) -> None:
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}; expected one of {', '.join(TASKS)}")
    if not 1 <= n_groups <= len(GROUPS):
        raise ValueError(f"n_groups: got {n_groups}; expected 1 to {len(GROUPS)}, the groups of the synthetic corpus")
    if rows_per_group < 1:
        raise ValueError(f"rows_per_group: got {rows_per_group}; expected at least 1")
    for what, share in repeated.items():
        if not 0 <= share <= 1 or (share and n_groups * rows_per_group < 2):
            raise ValueError(f"repeated_{what}: got {share}; expected a share of 0 to 1, with at least 2 rows")
    if not 10 <= input_words <= 2000:
        raise ValueError(f"input_words: got {input_words}; expected 10 to 2000")
