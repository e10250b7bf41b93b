"""Words and plots of the embedded story corpus: data only. `lib/stories.py` turns them into text.

How to read it
    {slot}      filled from the story's characters, place and things (the tables below)
    [a|b|c]     one of the alternatives, fixed when the tables are built
    one line    one way to tell a step; an indented line continues the one above
    -           the step may also be left out
    blank line  the next step
    /           the next step starts a new paragraph
    @name       a step that many plots share

Slots of the hero: {A} {he} {him} {his} {He} {His} {himself} {kind} {hand} {hands} {home} {hobby}
{trait} {a_size}; of the friend: {B} {Bfull} {bhe} {bhim} {bhis} {bHe} {bHis}; of the grown-up: {G}
{GG} (capital) {yourG} {Gcall} {ghe} {gHe} {ghim} {ghis}; of the place: {the_place} {at} {spot1}
{spot2} {spot3} {view}; of things: {obj} {a_obj} {adj} {a_adj} {use} {using}, the same with a 2 for
a second thing; of food: {a_food} {main} {extra}; of the day: {Day} {weather}; and {critter}
{a_critter}. The plots with cases (CASES) have slots of their own. {Slot} is {slot} with a capital
letter, and {the_slot} is {slot} with "the" for its "a" or "an".
"""

GIRLS = """
Lily Mia Anna Sara Zoe Emma Ella Nora Lucy Ruby Rosa Ivy Amy Clara Maya Lena Tina Nina Rita Molly
Polly Daisy Hazel Grace Alice Julia Sofia Olivia Ava Eva Leah Hannah Naomi Priya Aisha Fatima Yuki
Mei Ling Ines Carla Elsa Greta Heidi Ingrid Freya Astrid Maeve Nell Kate Jane Joan Betty Peggy Sally
Penny Jenny Wendy Cindy Mandy Holly Poppy Violet Iris Olive Pearl Opal Amber Jade Stella Luna Aurora
Dora Flora Cora Thea Tess Bella Gina Lola Lulu Mimi Kiki Zara Zadie Amara Nala Imani Leila Samira
Yasmin Noor Anika Devi Kavya Sana Hana Aiko Emi Rina
"""

BOYS = """
Tim Ben Tom Sam Max Jack Leo Finn Noah Liam Ethan Owen Jacob Peter Paul Mark Luke John Joe Bob Bill
Will Dan Ken Ron Ted Ned Fred Greg Carl Karl Eric Ian Ivan Igor Oscar Hugo Felix Theo Toby Rory Cody
Andy Billy Bobby Danny Eddie Freddy Georgie Henry Harry Jimmy Johnny Kenny Larry Mikey Neil Oliver
Patrick Quinn Ravi Arjun Rohan Kiran Omar Ali Hassan Yusuf Tariq Malik Kofi Kwame Jamal Diego Pablo
Pedro Mateo Rafael Marco Luca Dante Enzo Nico Anton Emil Axel Sven Lars Olaf Kenji Hiro Taro Ming
Wei Jin Milo Otto Walter Simon Adam David Daniel
"""

ANIMAL_NAMES = """
Pip Dot Hop Rusty Bramble Clover Fern Nutmeg Pepper Ginger Biscuit Waffle Pickle Pebble Acorn Maple
Willow Birch Thistle Mossy Sunny Cloudy Stormy Breezy Snowy Frosty Misty Sandy Dusty Smoky Shadow
Midnight Comet Star Twinkle Spark Blaze Ember Copper Goldie Silver Bronze Rocky Cliff Rumble Bumble
Tumble Wiggle Giggle Jiggle Wobble Bobble Nibble Scribble Squeak Chirp Peep Buzz Fuzzy Fluffy Puff
Patch Spot Stripe Button Bubble Tickle Whisper Dash Zip Scout Rascal Bandit Boots Mittens Socks
Cricket Chip Dale Hickory Olly Momo Kip Tuck Teddy Bo Coco Nilo Zuzu
"""

# animal, what it has for a hand
ANIMALS = """
fox paw, rabbit paw, bear paw, squirrel paw, mouse paw, hedgehog paw, badger paw, otter paw,
raccoon paw, beaver paw, mole paw, cat paw, dog paw, monkey hand, lion paw, tiger paw, panda paw,
koala paw, hamster paw, lizard foot, kangaroo paw, chipmunk paw, wolf paw, weasel paw, skunk paw,
porcupine paw, frog foot, turtle foot, toad foot, duck wing, chick wing, goose wing, robin wing,
sparrow wing, penguin wing, parrot wing, crow wing, deer hoof, lamb hoof, goat hoof, pony hoof,
pig hoof, donkey hoof, calf hoof, zebra hoof, giraffe hoof, elephant foot, hippo foot, ferret paw,
lynx paw, gopher paw, possum paw
"""

SIZES = """
little, small, young, tiny, sweet little, brave little, cheerful little, shy little, clever little,
curious little, playful young, quiet little, merry little, gentle young, friendly little,
lively young, dreamy little, thoughtful young, busy little, polite young
""".replace("\n", " ")

TRAITS = """
curious, kind, brave, cheerful, clever, gentle, helpful, playful, friendly, honest, patient,
careful, shy, polite, thoughtful, full of energy, full of questions, always hungry, always in a
hurry, always smiling, a little messy, a little stubborn, a bit clumsy, a good listener, a good
climber, quick and nimble, very tidy, very proud, never bored, never quiet for long, fond of jokes,
fond of riddles, fond of long naps, good at counting, good at finding things, hard to scare, easy to
love, a bit forgetful, quite stubborn, eager to learn
"""

CHILD_HOBBIES = """
draw pictures of ships, paint rainbows, jump in puddles, count the stars, build tall towers, sing
silly songs, dance in the kitchen, climb the apple tree, read books about dragons, feed the ducks,
collect smooth stones, play hide and seek, ride a red bicycle, bake little cakes, chase butterflies,
make paper planes, play the piano, water the flowers, look for four-leaf clovers, tell funny
stories, play soccer, swing very high, dress up as a pirate, pretend to be a doctor, make maps of
secret islands, learn new words, watch the trains go by, roll down the hill, help in the garden,
listen to the rain, visit the library, make friends with snails, invent strange machines, play the
violin, skip rope, dig for treasure, catch falling leaves, solve puzzles, write letters, look at the
moon, blow soap bubbles, make necklaces out of daisies
"""

ANIMAL_HOBBIES = """
roll in the clover, nap in the warm sun, collect shiny acorns, splash in the stream, chase falling
leaves, dig deep tunnels, count the clouds, sniff the wild flowers, race the wind, hum along with
the bees, look for sweet berries, climb to the highest branch, slide down muddy banks, listen to the
crickets, watch the fireflies, make crowns out of ivy, tell stories to the snails, play tag among
the ferns, skip pebbles across the water, sing with the birds, hide behind mushrooms, balance on
fallen logs, wiggle in the soft moss, jump over puddles, paint with berry juice, gather pine cones,
nibble on fresh grass, follow the butterflies, whistle at sunrise, make boats out of bark, look at
the stars, explore old caves, greet every beetle by name
"""

CHILD_HOMES = """
a yellow house near the sea; a small town between two hills; a tall house with a green door;
a quiet village; a noisy city; a cottage at the edge of the woods; a little flat above a bakery;
a farmhouse with a red roof; a white house on a hill; a street full of cherry trees;
a fishing village; a brick house beside the railway; a small house by the canal;
a wooden cabin by the lake; a house with a crooked chimney; a village where everyone was friendly;
a town with a big clock; a tiny house behind the school; a valley full of flowers;
a warm country far away; a snowy town in the north; a busy town by the harbor
"""

ANIMAL_HOMES = """
a cozy den under an old oak; a hollow log; a quiet forest; a green valley; a nest of soft moss;
a burrow at the edge of the meadow; a cave behind the waterfall; a warm barn; a sunny clearing;
a jungle full of songs; a hut made of reeds; a little house of twigs; a hole beneath the roots;
a thicket of blackberries; a village of animals; a shady grove; a cave on a faraway island;
a garden behind the mill; a mossy hollow; a forest where everyone was friendly
"""

# grown-up, how the hero calls them, pronoun
CHILD_GROWNUPS = """
{his} mom; Mom; she
{his} mom; Mommy; she
{his} mother; Mama; she
{his} dad; Dad; he
{his} dad; Daddy; he
{his} father; Papa; he
{his} grandma; Grandma; she
{his} grandpa; Grandpa; he
{his} grandmother; Nana; she
{his} aunt; Auntie; she
{his} uncle; Uncle; he
{his} teacher; Miss Brown; she
{his} teacher; Mr. Gray; he
{his} neighbor; Mrs. Hill; she
{his} neighbor; Mr. Cook; he
"""

ANIMAL_GROWNUPS = """
{his} mother; Mama; she
{his} mother; Mother; she
{his} father; Papa; he
{his} father; Father; he
{his} grandmother; Granny; she
{his} grandfather; Grandpa; he
{his} aunt; Auntie; she
the wise old owl; Owl; she
the old tortoise; Tortoise; he
the gray heron; Heron; he
the old toad; Toad; he
the oldest goose; Goose; she
"""

# place (as in "went to"), where (as in "played"), hiding spots, what could be seen there
CHILD_PLACES = """
the park; in the park; under the bench, behind the fountain, beside the swings, near the tall slide;
  ducks paddled on the pond, old men played chess in the shade, joggers hurried along the path
the beach; at the beach; behind a big rock, under a striped towel, in the soft sand, beside the tide
  pool; gulls cried over the waves, crabs ran sideways across the sand, small boats bobbed far away
the farm; on the farm; behind the haystack, under the tractor, inside the barn, next to the pig pen;
  hens scratched in the dirt, cows chewed slowly in the field, a rooster crowed on the fence
the zoo; at the zoo; near the monkey house, behind the ticket booth, under a picnic table, beside
  the penguin pool; giraffes nibbled at the treetops, seals splashed in the water, a lion yawned in
  the sun
the garden; in the garden; under the rose bush, behind the watering can, among the cabbages, beside
  the shed; bees hummed from flower to flower, tomatoes ripened in the sun, a snail crossed the path
the playground; on the playground; under the seesaw, behind the climbing frame, in the sandbox, near
  the gate; children shouted and laughed, the swings creaked, two girls drew with chalk
the market; at the market; under the fruit stand, behind a stack of crates, next to the cheese cart,
  beside the flower seller; people carried heavy bags, a man sold hot chestnuts, fish lay shining on
  the ice
the library; in the library; behind the tall shelves, under the reading table, between two thick
  books, beside the globe; readers turned their pages quietly, a clock ticked on the wall, sunlight
  fell on the carpet
the school yard; in the school yard; behind the bicycle rack, under the stairs, beside the big oak,
  near the fence; balls bounced everywhere, a bell rang in the hall, the teachers drank their tea
the river; by the river; under the bridge, behind the willow, among the reeds, beside the old boat;
  dragonflies darted over the water, a fisherman waited in the shade, the current carried little
  sticks along
the train station; at the train station; under the bench, behind the ticket machine, beside the
  suitcases, near the stairs; trains whistled, travelers waved goodbye, pigeons looked for crumbs
the museum; in the museum; behind a marble statue, under a glass table, beside the dinosaur bones,
  near the entrance; visitors whispered, knights in armor stood along the wall, huge paintings hung
  in golden frames
the attic; in the attic; under a dusty blanket, behind the old mirror, inside a trunk, beside the
  broken chair; spiders sat in their webs, boxes stood in crooked piles, dust danced in the light
the backyard; in the backyard; under the porch, behind the doghouse, beside the clothesline, in the
  tall grass; laundry flapped in the breeze, ants marched in a line, the neighbor's cat slept on the
  wall
the bakery; at the bakery; under the counter, behind the flour sacks, beside the oven, near the
  window; warm loaves cooled on the racks, the baker hummed a tune, customers waited in a line
the campground; at the campground; behind the tent, under the canoe, beside the campfire, near the
  pine trees; smoke curled up between the pines, tents glowed in the light, someone played a guitar
the harbor; at the harbor; behind a coil of rope, under a fishing net, beside the lighthouse,
  between two barrels; sailors unloaded their boxes, ropes creaked, a big ship blew its horn
the orchard; in the orchard; under the ladder, behind the apple crates, beside the stone wall, in a
  wheelbarrow; ripe fruit hung from the branches, wasps buzzed over the fallen pears, a ladder
  leaned against a trunk
the toy shop; in the toy shop; behind the puppets, under the train table, beside the teddy bears,
  near the door; wooden soldiers stood in rows, a tiny train went round and round, kites hung from
  the ceiling
the castle; at the castle; behind the thick gate, under the drawbridge, beside the well, near the
  tower; flags waved on the towers, moss grew between the stones, a guide told stories about kings
the fair; at the fair; behind the puppet stage, under the carousel, beside the popcorn cart, near
  the big tent; music played, painted horses went round and round, a juggler threw five hoops into
  the air
the lake; at the lake; under the dock, behind the canoes, beside the picnic basket, among the
  pebbles; swans drifted past, fish jumped out of the water, rowers called to each other
"""

ANIMAL_PLACES = """
the forest; in the forest; under a fern, behind the fallen log, inside a hollow stump, beside the
  toadstools; woodpeckers tapped on the trunks, sunlight fell through the leaves, a deer stepped
  softly by
the meadow; in the meadow; among the daisies, under a thistle, behind the big stone, beside the
  molehill; grasshoppers sang, poppies nodded in the wind, butterflies danced over the clover
the river; by the river; under the bridge, behind the willow, among the reeds, beside the dam;
  dragonflies darted over the water, trout swam against the current, the water gurgled over the
  stones
the pond; at the pond; under a lily pad, behind the cattails, beside the sunken boat, in the mud;
  tadpoles wriggled near the shore, frogs croaked in a choir, water spiders skated about
the hill; on the hill; behind the crooked pine, under the heather, beside the stone circle, in a
  rabbit hole; clouds sailed by, the whole valley lay below, the wind combed the long grass
the jungle; in the jungle; under a giant leaf, behind the vines, inside a hollow tree, beside the
  waterfall; parrots chattered, bright flowers opened, monkeys swung from branch to branch
the valley; in the valley; under the hazel bush, behind the mill, beside the brook, among the
  boulders; sheep bells tinkled, mist lay over the grass, an eagle circled high above
the swamp; in the swamp; under a twisted root, behind the rushes, beside a soggy log, in a patch of
  moss; fireflies blinked, bubbles rose from the mud, herons stood on one leg
the farm; on the farm; behind the haystack, under the wagon, inside the barn, next to the trough;
  hens scratched in the dirt, cows chewed slowly, the farmer sharpened his tools
the orchard; in the orchard; under a ladder, behind the baskets, beside the beehives, in the long
  grass; ripe plums fell with a thump, starlings argued in the branches, bees hummed around the
  hives
the beach; at the beach; behind a big rock, under the seaweed, in a sandy hole, beside the
  driftwood; waves rolled in and out, crabs ran sideways, gulls glided over the foam
the cave; in the cave; behind a tall stone, under a ledge, beside the dark pool, near the entrance;
  water dripped from the roof, crystals glittered, bats hung upside down
the mountain; on the mountain; under the snow, behind a cliff, beside the spring, in a narrow crack;
  goats jumped from rock to rock, icy streams rushed down, echoes answered every call
the garden; in the garden; under the rhubarb, behind the scarecrow, among the carrots, beside the
  compost heap; bees hummed from flower to flower, pumpkins grew fat, a worm peeked out of the soil
"""

# thing; what one does with it; doing that
OBJECTS = """
kite; fly it; flying it
ball; bounce it; bouncing it
drum; play it; playing it
doll; dress it up; dressing it up
teddy bear; hug it; hugging it
toy boat; sail it; sailing it
whistle; blow it; blowing it
bell; ring it; ringing it
spinning top; spin it; spinning it
hat; wear it; wearing it
scarf; wear it; wearing it
cape; wear it; wearing it
crown; wear it; wearing it
mask; wear it; wearing it
book; read it; reading it
storybook; read it; reading it
lantern; carry it; carrying it
marble; roll it; rolling it
flute; play it; playing it
trumpet; play it; playing it
toy guitar; play it; playing it
umbrella; open it; opening it
basket; fill it; filling it
bucket; fill it; filling it
shovel; dig with it; digging with it
toy train; push it; pushing it
toy car; race it; racing it
toy truck; push it; pushing it
robot; wind it up; winding it up
rocket; launch it; launching it
puppet; make it dance; making it dance
jump rope; skip with it; skipping with it
hoop; roll it; rolling it
blanket; cuddle it; cuddling it
coin; flip it; flipping it
seashell; listen to it; listening to it
feather; tickle everyone with it; tickling everyone with it
ribbon; wave it; waving it
necklace; wear it; wearing it
bracelet; wear it; wearing it
magnet; try it on everything; trying it on everything
compass; follow it; following it
map; study it; studying it
telescope; look through it; looking through it
magnifying glass; look through it; looking through it
camera; take pictures with it; taking pictures with it
flashlight; shine it around; shining it around
backpack; carry it; carrying it
cup; drink from it; drinking from it
music box; listen to it; listening to it
snow globe; shake it; shaking it
pinwheel; watch it spin; watching it spin
boomerang; throw it; throwing it
frisbee; throw it; throwing it
xylophone; play it; playing it
tambourine; shake it; shaking it
toy castle; guard it; guarding it
rocking horse; ride it; riding it
paper crane; make it fly; making it fly
notebook; write in it; writing in it
sketchbook; draw in it; drawing in it
paintbrush; paint with it; painting with it
key; turn it in every lock; turning it in every lock
mitten; wear it; wearing it
watch; check it; checking it
puzzle; solve it; solving it
purse; open it; opening it
glove; wear it; wearing it
beanbag; toss it; tossing it
yo-yo; swing it up and down; swinging it up and down
harmonica; play it; playing it
toy dragon; make it roar; making it roar
toy dinosaur; make it stomp; making it stomp
toy airplane; make it zoom; making it zoom
bow; wear it; wearing it
jar; fill it; filling it
tiny teapot; pour with it; pouring with it
toy sword; wave it; waving it
shield; hide behind it; hiding behind it
dice cup; shake it; shaking it
"""

ADJECTIVES = """
red, blue, green, yellow, orange, purple, pink, white, black, brown, golden, silver, gray, striped,
spotted, checkered, shiny, sparkly, bright, pretty, beautiful, lovely, old, new, ancient, tiny,
little, big, huge, enormous, round, smooth, soft, fancy, funny, strange, plain, dusty, rusty, clean,
special, wonderful, precious, rare, curious, colorful, painted, polished, crooked, handmade,
expensive, simple, magnificent, ordinary, unusual, interesting, elegant, violet, turquoise, crimson
"""

# with article; main ingredient; second ingredient
FOODS = """
an apple pie; apples; cinnamon
a chocolate cake; chocolate; butter
a carrot cake; carrots; nuts
a loaf of bread; flour; yeast
a pot of soup; potatoes; leeks
a bowl of salad; lettuce; tomatoes
a pizza; cheese; tomatoes
a lemon cake; lemons; sugar
a blueberry pie; blueberries; butter
a pumpkin pie; pumpkin; nutmeg
a banana pudding; bananas; milk
a pot of jam; strawberries; sugar
a fruit salad; oranges; grapes
a honey cake; honey; eggs
a cherry tart; cherries; cream
some cookies; oats; raisins
some pancakes; eggs; milk
some muffins; blueberries; flour
some waffles; eggs; vanilla
some sandwiches; bread; cucumbers
some biscuits; butter; ginger
some cupcakes; sugar; cream
some dumplings; flour; mushrooms
some rolls; flour; sesame seeds
"""

CRITTERS = """
sparrow, beetle, butterfly, ladybug, snail, bee, dragonfly, cricket, worm, spider, ant, moth,
pigeon, magpie, gecko, caterpillar, salamander, wren, bat, crab, swallow, goldfinch, grasshopper,
jay, finch
"""

# how the day begins; what the sky is like
DAYS = """
One day; The sky was blue and clear.
One sunny morning; The sun was warm and bright.
One bright morning; There was not a cloud in the sky.
One warm afternoon; The air smelled of fresh grass.
One windy day; The wind shook the trees.
One windy afternoon; Leaves whirled through the air.
One cloudy day; Gray clouds hid the sun.
One cool morning; Fog lay over the ground.
One rainy day; Raindrops pattered all around.
One autumn day; Red and yellow leaves covered the ground.
One spring morning; Tiny buds were opening everywhere.
One summer day; It was hot, and even the shade was warm.
One winter day; A thin layer of snow lay on the ground.
One quiet afternoon; It was so still that a feather would not have moved.
One fine day; A gentle breeze was blowing.
Early one morning; Dew sparkled on the grass.
One Saturday; White clouds drifted by like sheep.
One Sunday; The sun peeked through the clouds.
On a lovely spring day; Birds sang in every tree.
On a chilly day; Everyone's breath made little clouds.
On the first day of summer; The days were long and golden.
After breakfast one day; The morning light was soft.
One day after lunch; The sun stood high in the sky.
One beautiful day; The whole world seemed to shine.
"""

SHARED = {
    "opening": """
Once upon a time, there was {a_size} {kind} named {A}.
Once upon a time, there was {a_size} {kind} named {A} who lived in {home}.
Once upon a time, {a_size} {kind} named {A} lived in {home}.
There once was {a_size} {kind} [called|named] {A}, who lived in {home}.
In {home}, there lived {a_size} {kind} named {A}.
{A} was {a_size} {kind} who lived in {home}.
[Long ago|Not so long ago|Many years ago], in {home}, there lived {a_size} {kind} named {A}.
This is the story of {A}, {a_size} {kind} from {home}.
""",
    "likes": """
{A} [loved|liked] to {hobby}[ every day| all day long| more than anything else||].
{He} was {trait}, and {he} loved to {hobby}.
[Everybody|Everyone] knew that {A} was {trait}.
What {A} liked [best|most of all] was to {hobby}.
{A} was {trait}.
{His} favorite thing in the whole world was to {hobby}.
On most days, {he} would {hobby} until [it was time for supper|the sun went down|{G} called {him}].
{His} friends said that {he} was {trait}, and [they were right|that was true].
-
""",
    "outing": """
{Day}, {A} [went|walked|hurried|skipped] to {the_place} with {his} friend {Bfull}.
{Day}, {A} and {his} [good |best |]friend {Bfull} were playing {at}.
{Day}, {A} met {his} friend {Bfull} {at}.
{Day}, {Bfull} [knocked on {A}'s door|came to visit {A}]. "Let's go to {the_place}!" {bhe}
  [said|called|shouted].
{Day}, {A} asked {his} friend {Bfull} to come along to {the_place}.
{Day}, {G} took {A} and {his} friend {Bfull} to {the_place}.
""",
    "scene": """
{weather}
{weather} [All around|Nearby|Not far away], {view}.
[All around them|Nearby|Not far away], {view}.
It was a [good|fine|perfect|wonderful] day to be {at}, where {view}.
-
""",
    "parting": """
When [the sun began to set|evening came|it grew late|the first star came out], they
  [walked|strolled|went] home[ together| side by side||].
[Soon|Before long|At last], it was time to go home.
Then they [sat down|rested] {at} and [watched the clouds|shared a snack|talked about everything].
They stayed {at} until [supper time|{G} called them|the sky turned pink|the moon came up].
[Afterward|Later], {G} made [hot cocoa|warm soup|sweet tea|a tasty supper] for [everyone|them both].
-
""",
    "closing": """
From that day on, {A} and {B} [were the best of friends|did everything together|never forgot
  what had happened|trusted each other even more].
That night, {A} fell asleep with a [big|happy|little|sleepy] smile.
And they [all |both |]lived happily ever after.
{A} [never forgot|always remembered] that day {at}.
It had been [a very good day|a day like no other|a day to remember|quite an adventure].
{A} could not wait [to tell everyone|to see {B} again|for the next adventure].
And if you ever go to {the_place}, you [may|might] still [hear them laughing|see them there].
"What a day!" said {A}, and {B} [laughed|nodded|agreed|smiled].
In bed that night, {A} thought about the whole day again[ and again||, and smiled].
The end.
""",
    "ending": """
From that day on, {A} and {B} [were the best of friends|did everything together|never forgot what
  had happened|trusted each other even more].
That night, {A} fell asleep with a [big|happy|little|sleepy] smile.
And they [all |both |]lived happily ever after.
It had been [a very good day|a day like no other|a day to remember|quite an adventure].
{A} could not wait [to tell everyone|to see {B} again|for the next adventure].
"What a day!" said {A}, and {B} [laughed|nodded|agreed|smiled].
In bed that night, {A} thought about the whole day again[ and again||, and smiled].
The end.
""",
    "view": """
[All around|Nearby|Not far away], {view}.
It was a [good|fine|perfect|wonderful] day to be {at}, where {view}.
-
""",
}

# Slots of one plot that belong together: first their names, then one case a line.
CASES = {
    "honest": """
treasure
vase
teacup
mirror
lamp
teapot
clay bowl
glass swan
picture frame
music box
flower pot
plate
sugar bowl
porcelain doll
snow globe
candlestick
violin
hourglass
candy jar
""",
    "broken": """
thing; crash; part; repair; tool
toy boat; It hit a stone, and the mast snapped; mast; tied a straight twig in its place; string
kite; A branch tore a hole in its tail; tail; sewed a new tail from old ribbons; needle and thread
wooden horse; It fell down the steps, and one leg came off; leg; glued the leg back on; glue
music box; It slipped and fell, and the tune stopped; spring; put the tiny spring back; a
  screwdriver
wagon; It rolled into a ditch, and a wheel broke off; wheel; pushed the wheel back on; a hammer
drum; Somebody stepped on it, and the skin ripped; skin; stretched a new skin over it; rope
lantern; A gust knocked it over, and the glass cracked; glass; fitted a new glass; a soft cloth
birdhouse; It dropped from the tree, and the roof split; roof; nailed on a new roof; nails
paper lion; Water splashed it, and its mane came loose; mane; pasted on a mane of wool; paste
scooter; It bumped into a wall, and the handle bent; handle; straightened the handle; a wrench
teapot; It tipped over, and the spout chipped; spout; smoothed the spout with care; sandpaper
clock; It tumbled off the shelf, and a hand fell off; hand; clipped the hand on again; tweezers
""",
    "fear": """
fear; sign; test; trick; truth
the dark; hid under the covers every night; walk through the dark tunnel; carry a jar of fireflies;
  the dark was only the day with its eyes closed
thunder; trembled at every rumble; stand at the window in a storm; count from the flash to the boom;
  thunder was only noisy weather
deep water; never went in above the knees; swim to the raft; kick and breathe out slowly; the water
  would hold up anyone who stayed calm
high places; felt dizzy on a stool; climb up to the lookout; look at the sky instead of the ground;
  the view was worth every step
big dogs; crossed the road at every bark; walk past the gray dog; hold out a hand and speak softly;
  the dog only wanted a friend
spiders; screamed at every cobweb; carry a spider outside; use a glass and a sheet of paper; spiders
  were more scared than anyone
strangers; hid behind the nearest tree; say hello to the new neighbor; take one deep breath and
  smile; a stranger was a friend without a name
singing in front of others; went red and silent; sing at the spring party; look only at one kind
  face; everyone wanted the song to go well
the old bridge; always took the long way around; cross the old bridge; take one plank at a time; the
  bridge was stronger than it looked
the doctor; ran away from every white coat; go to the doctor with a sore throat; squeeze a soft
  pillow; the doctor's hands were gentle
making mistakes; never tried anything new; dance at the festival; laugh first when a step went
  wrong; mistakes were only lessons in disguise
ghosts; saw one in every curtain; look behind the rattling door; bring a lamp and a loud song; the
  ghost was just the wind in an old coat
""",
    "skill": """
skill; doing; slip; advice; proof
swim; swimming; swallowed a mouthful of water; Keep your chin up and kick; swam across the pond
whistle; whistling; made only a wet, hissing noise; Make your lips small and round; whistled a tune
skate; skating; landed on the ice with a bump; Bend your knees a little; glided in a perfect circle
juggle; juggling; dropped all three pebbles; Watch the top, not your fingers; juggled five pebbles
ride a bicycle; riding; wobbled into a hedge; Look ahead and keep pedaling; rode all the way around
tie a knot; tying knots; got tangled in the string; Over, under, and through; tied up a whole parcel
climb a rope; climbing; slid back to the bottom; Hold tight with your feet; touched the very top
read; reading; mixed up all the letters; Say each sound slowly; read a whole page aloud
paint; painting; spilled the blue all over; Use less water and more patience; painted a fine sunset
dance; dancing; stepped on everybody's toes; Listen for the beat; danced without one wrong step
cook; cooking; burned the very first egg; Turn down the heat; cooked breakfast for everyone
row a boat; rowing; went around in circles; Pull both oars together; rowed to the other shore
catch a ball; catching; covered both eyes; Keep your eyes open; caught ten throws in a row
ski; skiing; tumbled into a snowdrift; Point your toes together; came down the hill like the wind
weave a basket; weaving; ended up with a lumpy mat; Pull each straw tight; wove a basket with a lid
play chess; playing; lost in four moves; Think about what comes next; won a long, hard game
""",
    "rescue": """
pet; trouble; sound; aid; later
kitten; was stuck high up in a tree; meowed; set a long ladder against the trunk; purred like a
  little engine
puppy; had a thorn in one foot; whimpered; pulled the thorn out gently; wagged its tail
baby bird; had fallen out of its nest; cheeped; lifted it back into the nest; sang every morning
duckling; could not find its family; peeped; carried it to the other ducks; swam in a happy circle
lamb; was caught in a fence; bleated; lifted the wire off its wool; leaped for joy
baby turtle; was lying on its back; wiggled; turned it over and led it to the water; paddled away
squirrel; was shivering in the cold; squeaked; wrapped it in a warm scarf; brought them an acorn
baby owl; had hurt its wing; hooted; bandaged the wing with a clean strip of cloth; flew over them
  on silent wings
piglet; was stuck deep in the mud; squealed; laid down boards and pulled; rolled over in delight
foal; had lost its way in the mist; whinnied; rang a bell until its mother came; galloped in circles
hedgehog; had a jar stuck on its head; snuffled; rubbed butter on the jar and twisted; ate a fat
  worm
bat; had flown into a net; chirped; snipped the threads one by one; danced in the evening sky
calf; had slipped into a ditch; mooed; dug a little path up the side; licked their faces
rabbit; was trapped under a basket; thumped; tipped the basket over; nibbled a carrot with them
""",
    "mystery": """
noise; guess; cause; cure
a tapping noise; a woodpecker with a cold; a loose shutter; fastened it with a hook
a scratching noise; a mouse writing a letter; a lost kitten; gave it some milk and found its home
a humming noise; a very tiny orchestra; a nest of bees; tiptoed away and left them in peace
a squeaking noise; a door that was telling secrets; a rusty wheel; put a drop of oil on it
a rustling noise; a dragon turning pages; a hedgehog in the leaves; left it a slice of apple
a dripping noise; a cloud that had come inside; a leaking pipe; put a bucket under it
a howling noise; a lonely wolf; the wind in an empty bottle; put a cork in it
a rattling noise; a skeleton with cold knees; a jar of buttons on a shelf; moved it to a softer
  place
a moaning noise; a sad ghost; an old pump that needed grease; greased it until it was silent
a ticking noise; a beetle with new boots; a forgotten clock; wound it up and hung it on the wall
a splashing noise; a whale in the wrong place; a duck in the washtub; showed it the way to the pond
a snoring noise; a bear in the cupboard; an old dog under the stairs; covered it with a blanket
a ringing noise; a fairy calling for tea; a goat with a bell; untied it from the bush
""",
    "build": """
work; stuff; ruin; better
a sandcastle; wet sand and shells; a big wave rolled over it; moved farther from the water
a tree house; boards and rope; a storm blew the roof away; tied every board down twice
a dam; sticks and mud; the stream washed it away; put heavy stones at the bottom
a snow fort; round white blocks; the warm sun melted one wall; built it in the shade
a raft; logs and vines; it came apart in the current; used thicker knots
a tower; wooden blocks; somebody sneezed and it fell; made the bottom much wider
a tent; sheets and poles; a gust turned it upside down; pegged down all the corners
a bridge; planks and stones; the middle cracked; set a strong post in the middle
a den; branches and ferns; rain dripped through the roof; added a thick layer of moss
a scarecrow; straw and old clothes; the crows stole its hat; gave it shiny tin eyes and new arms
a bird feeder; a box and some wire; it crashed to the ground; hung it from a stronger branch
a go-cart; crates and wheels; the front wheel rolled off; fixed it with a longer bolt
a maze; hay and barrels; the goats ate half of it; put a fence around it
""",
    "warning": """
rule; deed; result; remedy; lesson
Do not eat too many sweets; ate a whole bag of candy; had a terrible stomachache; drank mint tea and
  lay still; a little is often enough
Do not go near the beehive; poked the beehive with a stick; was chased by a cloud of bees; sat in a
  cool bath; bees like to be left alone
Do not walk on the thin ice; took one step onto the ice; heard a crack and got one very wet leg;
  warmed up beside the fire; warnings are there for a reason
Do not open the gate; lifted the latch of the gate; saw all the sheep run out; called the sheep back
  one by one; a gate is closed for a reason
Do not stay out in the rain; splashed about in the rain for hours; caught a nasty cold; stayed in
  bed with hot soup; a warm coat is a good friend
Do not touch the fresh paint; touched the fence to see if it was dry; was green from top to toe;
  scrubbed and scrubbed with soap; patience keeps you clean
Do not pick the strange berries; picked a handful of berries; had a blue tongue and a sore tummy;
  drank a lot of water and rested; not everything pretty is good to eat
Do not play with the matches; took one match out of the box; burned a finger; held the finger under
  cold water; fire is not a toy
Do not climb the wobbly wall; climbed to the top of the wall; slid down and scraped both knees; let
  someone clean the scratches; it is wise to listen
Do not stay up late; played in secret until midnight; was too tired for the picnic the next day;
  slept the whole afternoon; sleep is a gift
Do not feed the goose; waved a crust at the goose; was chased all around and around; threw the crust
  far away and ran; geese have bad manners
Do not shake the bottle; shook the bottle of soda as hard as possible; was sticky from head to foot;
  washed everything twice; some jokes are on the joker
""",
    "trade": """
first; second; third; last; need1; need2; need3
a button; a ball of string; a basket of pears; a puppy; had lost one; needed to fly a kite; was
  terribly hungry
a feather; a jar of ink; a silver pen; a book of fairy tales; needed one for a hat; wanted to write
  a letter; had a poem in mind
an egg; a cup of sugar; a lemon cake; a ride in a balloon; wanted to bake; liked sweet things; had
  not eaten since dawn
a candle; a pair of socks; a warm coat; a sled; was afraid of the dark; had cold feet; was going to
  the mountains
a pebble; a toy boat; a fishing rod; a shining trout; collected stones; had a pond and no boat; had
  holes in the net
a daisy; a pot of honey; a bell; a little goat; wanted to smell something nice; had a sore throat;
  kept losing a cow
an apple; a bundle of hay; a horseshoe; a ride on a pony; wanted something juicy; had a hungry
  donkey; needed a bit of luck
a paper boat; a cork; a bottle of juice; a picnic for two; wanted to sail; had an empty bottle to
  close; was very thirsty
a nail; a wooden sign; a bag of seeds; a row of sunflowers; had a picture to hang; was opening a
  shop; had an empty garden
""",
    "helper": """
who; job; load; reward
an old sailor; mend a torn net; the knots were stiff; a story about whales
a tired baker; carry sacks of flour; each sack was heavy; a basket of fresh rolls
an old lady; sweep up the leaves; the wind kept blowing them back; a pair of warm gloves
a gardener; pull out the weeds; the roots were long; a pot with a tiny rose
a postman; deliver the letters; there were so many streets; a stamp from far away
a shepherd; find the last sheep; the hill was steep; a ball of soft wool
a painter; wash all the brushes; the paint was thick; a picture of a rainbow
a clockmaker; sort the tiny wheels; they rolled off the table; a small clock with a bird in it
a farmer; pick the ripe apples; the branches were high; a bag of crunchy apples
a librarian; put the books in order; some letters looked the same; a book with golden edges
a miller; chase the pigeons from the grain; they always came back; a warm loaf
a traveler; find the right road; all the signs were faded; a map of the whole land
a musician; carry a huge cello; the road was rough; a song with their names in it
a beekeeper; label the honey pots; the labels were sticky; a pot of golden honey
""",
    "wish": """
giver; power; first_fun; gone_wrong; undo
a tiny fairy; everything {he} touched turned to chocolate; the spoon tasted delicious; even the
  pillow began to melt; touched the oldest stone and said sorry
a talking fish; {he} could fly; the roofs looked like toys; it was impossible to come down; folded
  both arms and thought of home
a star that had fallen; {he} never had to sleep; there was time for everything; the nights were long
  and lonely; closed both eyes and counted to one hundred
a wizard with a squeaky voice; every day was a birthday; there were presents everywhere; nobody was
  happy about them anymore; gave the last present away
a golden frog; {he} grew as tall as a tower; one could see to the end of the world; no door was big
  enough; bent down to a daisy and whispered please
an old genie; {he} could talk to things; the chair told a joke; all the things talked at the same
  time; asked them all to be silent
a white deer; it never rained; every day was sunny and dry; the flowers began to droop; watered one
  small flower with care
a friendly witch; {he} could turn invisible; it was easy to win at hide and seek; nobody answered
  anymore; called a friend by name three times
a little dragon; it snowed in the middle of summer; the snow was soft and sweet; the bees and the
  birds were freezing; breathed on a snowflake until it melted
a mermaid; all the clocks stopped; there was no bedtime; nobody could ever have supper; wound up the
  oldest clock
""",
}

PLOTS = {
    "lost": """
@opening

@likes

{A} had {a_adj} {obj}, and {he} [loved|liked] {using}[ every day| more than anything||].
Of all {his} things, {he} loved {his} {adj} {obj} [best|the most].
For {his} birthday, {G} had given {him} {a_adj} {obj}, and {he} took it everywhere.
{A} [owned|had] {a_adj} {obj} that once belonged to {G}.
/
@outing

@scene

They played [happily|for a long time|all morning|one game after another], but [then|suddenly|after a
  while] {A} [noticed|saw|realized] that the {obj} was [gone|missing].
{A} wanted to {use}, but when {he} looked for the {obj}, it was [gone|nowhere to be seen].
[Suddenly|All at once], {A} stopped. "My {obj}! It was right here, and now it is gone!"
{A} put the {obj} down for [a moment|a minute|just a little while]. When {he} turned around, it had
  [vanished|disappeared].

{He} felt [very sad|terrible|like crying|cold with worry].
A [big|single|hot] tear rolled down {his} [cheek|nose|face].
{His} [heart sank|lip trembled|voice shook|eyes filled with tears].
-
/
"[Don't cry|Don't worry|Cheer up|Do not give up]," said {B}. "[We will find it|I will help you
  look|Two can search better than one|Things do not just walk away]."
"When did you see it last?" asked {B}. {A} [thought hard|scratched {his} head|tried to remember].
{B} put an arm around {him} and [said|whispered], "[Let's look together|We will search until we find
  it]."

First they looked {spot1}, but [there was nothing|they found only dust|all they found was an old
  sock|nothing was there except {a_critter}].
They [started|began] {spot1}. [No {obj}|Nothing] there.
{A} [searched|looked|peeked] {spot1}, but [the {obj} was not there|it was empty|had no luck].

Then they [searched|looked|checked] {spot2}. There was [nothing there, either|only {a_critter}
  there|no sign of the {obj}].
Then {B} [crawled around|looked] {spot2} and found {a_adj2} {obj2}, but not the {obj}.
Next they asked {a_critter} {spot2}. "I saw something {adj}," it said. "[Try|Look] {spot3}!"
They called and looked {spot2}, too, but [found nothing|it was no use].
/
At last, {B} [pointed|shouted|cried out]. There, {spot3}, [was|lay] the {adj} {obj}!
[Finally|In the end], {A} looked {spot3}, and there it was: the {adj} {obj}[, safe and sound||]!
Then something {adj} [caught {A}'s eye|glinted|showed]. The {obj} was {spot3}!
Just when {A} wanted to give up, {B} found the {obj} {spot3}.

{A} [hugged|squeezed|held] the {obj} tightly. "[Thank you|Thanks], {B}! [I could not have done it
  alone|You are a true friend|You have sharp eyes]!"
"Hooray!" [cried|shouted|cheered] {A}, and {he} [danced|jumped|hopped] for joy.
{A} was so [happy|relieved|glad] that {he} let {B} [have the first turn|{use} first|hold it all the
  way home].

After that, {A} always [kept an eye on|took good care of|put away] {his} {obj}.
{A} had learned to [take care of {his} things|look after what {he} loved|ask for help when {he}
  needed it].
-

@parting

@closing
""",
    "broken": """
@opening

@likes
/
{Day}, {A} and {Bfull} were playing with {A}'s {adj} {thing} {at}.
{Day}, {A} and {his} friend {Bfull} took {A}'s favorite {thing} to {the_place}. It was {adj} and
  new.
{Day}, {his} friend {Bfull} came [over|by] to see {A}'s {adj} {thing}. They [took|carried] it to
  {the_place}.

@scene

But then [something bad happened|there was an accident|everything went wrong]. {crash}!
[Suddenly|All of a sudden], there was a [loud|nasty|terrible] crack. {crash}!
They were having so much fun that they [forgot to be careful|did not look]. {crash}!

"Oh no, [it is broken!|look at the {part}!|what have I done?]" [cried|wailed|sobbed] {A}.
{A} stared at the {part} and [did not know what to do|could not say a word|began to cry].
/
"We can [throw it away|buy a new one]," said {B}, but {A} shook {his} head. "[I want this one|It is
  special to me|It was a birthday present]."
{B} felt [bad|sorry|awful]. "[Maybe we can fix it|It was my fault, too|Let me help you]," {bhe}
  said.
{B} [came closer|bent down]. "[Let me see|Show me|Hold still]," {bhe} said. "Only the {part} is
  broken."

First they tried to [hold it together with mud|tie it up with grass|stick it together with gum|wrap
  it in leaves], but [it did not work|that only made a mess|it fell apart again].
{A} tried to fix the {part} alone, but {his} {hands} [shook|were too small|were clumsy].
They tried once, and they tried twice, but the {part} [would not stay|came off again|was still
  loose].

So they [went to|asked|ran to] {G} for help. "[Bring it here|Let me look at it|That is not so bad],"
  said {G}.
{GG} saw their [long|sad|worried] faces. "[What is the matter|What happened], my dears?" {ghe}
  asked.
"We need [help|somebody clever]," said {A}. They showed the {thing} to {G}.
/
{GG} [fetched|found|took out] {tool} and showed them how. [Slowly and carefully|Bit by bit|With
  care], {A} {repair}.
With {tool} and a [lot|little bit] of patience, {A} {repair}, while {B} held the {thing} still.
"Every {part} can be mended," said {G}. {gHe} gave them {tool}, and together they {repair}.

When they were done, the {thing} [looked as good as new|was even better than before|worked
  perfectly].
There was still a [small|tiny|thin] mark on the {part}, but {A} [did not mind|liked it that way].

"[Look|See]! It works!" [shouted|cheered] {A}. "[Thank you|Thanks], {Gcall}! Thank you, {B}!"
{A} [beamed|smiled from ear to ear|clapped {his} {hands}]. "We fixed it [ourselves|together]!"
"[Well done|Good work|I am proud of you]," said {G}. "[You did not give up|Now you know how to do
  it]."

{A} learned that [broken things can be mended|accidents happen to everyone|a friend makes hard work
  easy].
Now, whenever something broke, {A} [knew what to do|said, "Let's fix it!"|was not afraid].
-

@closing
""",
    "share": """
@opening

{He} had {a_adj} {obj}, and nobody else was allowed to touch it.
{GG} had [made|bought|given] {him} {a_adj} {obj}. {He} [would not let go of it|kept it all to
  {himself}].
{A} was {trait}, but there was one thing {he} did not like: sharing.
/
@outing

@scene

{B} saw the {obj} and [asked|said], "[May I|Can I] {use}, [too|please]?"
"What {a_adj} {obj}!" said {B}. "[May I have a turn|Can I try it|Will you let me {use}]?"
{B} [wanted|longed] to {use}, too, and reached out for it.

"No!" [said|snapped|shouted] {A}. "[It is mine|You will break it|Get your own {obj}]!"
{A} [held the {obj} tight|hid the {obj} behind {his} back] and shook {his} head. "[No|Never]! It is
  mine."
"Not now," said {A}. But later {he} said it again, and again.
/
{B} [looked down|said nothing|bit {bhis} lip] and [walked|wandered] away[ slowly| all alone||].
{B} got [angry|upset] and pulled at the {obj}. {A} pulled back, and both of them [fell down|tumbled
  over].
"Then I do not want to play with you anymore," said {B}, and {bhe} [sat down|went to sit] {spot1}.

So {A} played alone. But {using} alone was [not much fun|boring|rather lonely].
Now {A} had the {obj} [all to {himself}|and no friend]. It did not feel as good as {he} had thought.
{A} went on {using}, but [there was nobody to laugh with|{he} kept looking over at {B}].

Just then, {A} saw that {B} had {a_adj2} {obj2}. It looked like [a lot of|great|so much] fun.
{GG} saw it and said, "[A toy is more fun with two|Sharing makes joy twice as big|A friend is worth
  more than any {obj}]."
{A_critter} [landed|stopped] next to {him}. "[Are you sad|Why are you alone]?" it asked. {A} had
  no answer.
{A} remembered how {B} had once shared {a_food} with {him}.
/
{A} took a deep breath and went over to {B}. "I am sorry," {he} said. "[Do you want to {use}?|You
  can have the first turn.|Let's play together.]"
"{B}, please come back," said {A}. "[I was selfish|I was mean|I should have shared]. Here, you go
  first."
At last, {A} [held out|offered] the {obj}. "[Here|Take it]," {he} said [softly|quietly|shyly]. "It
  is your turn."

{B} [smiled|grinned|beamed]. "[Thank you|Really? Thanks]! And you may {use2}."
{B} [forgave {him} at once|was not angry anymore|gave {him} a hug].
"[That is all right|I am sorry, too]," said {B}. "I should not have been so [angry|cross]."

They took turns {using} and {using2}.
Soon they were [laughing|giggling|playing] together again, first with the {obj}, then with {B}'s
  {obj2}.
They invented a game for two, and it was [better|funnier] than any game for one.

{A} learned that [sharing is fun|sharing makes friends|a thing is nicer when it is shared].
-

@parting

@closing
""",
    "fear": """
@opening

@likes

There was only one thing {A} was afraid of: {fear}.
But {A} had a secret. {He} was [very much|terribly|dreadfully] afraid of {fear}.
{A} was not afraid of [monsters|mud|mice], but {he} was afraid of {fear}.

Because of {fear}, {A} {sign}.
Whenever {he} thought of {fear}, {he} felt [cold|small|shaky inside]. {He} {sign}.
The others sometimes [laughed|teased {him}], because {A} {sign}.
-
/
{Day}, {A} had to {test}. {His} friend {Bfull} [came along|was there, too|knew all about it].
{Day}, {his} friend {Bfull} said, "[Today|This time] you could {test}!" {A} [turned pale|swallowed
  hard| shook {his} head].
{Day}, it was time for {A} to {test}. {His} friend {Bfull} [had done it already|went with {him}].

{weather}
-

"I can't do it," [whispered|said|mumbled] {A}. "[My knees are shaking.|I am too scared.|What if
  something goes wrong?]"
{His} heart [pounded|thumped|beat like a drum]. {He} wanted to [run away|go home|hide behind {G}].
{A} took one step forward and [two steps back|stopped].
/
"[Everybody|Everyone] is afraid of something," said {G}. "[I was scared, too, when I was
  little|Being brave means being scared and trying anyway]."
"I used to be afraid of {fear}, too," said {B}. "[Nobody knew|I never told anyone]."
{B} did not laugh. "[I will stay with you|I am right beside you|We will do it together]," {bhe}
  said.

{B} knew [a trick|what helps]. "[Whenever I am scared|When it gets bad], I {trick}," {bhe}
  [said|whispered].
And {B} had good advice: {trick}. [It always worked|That was the whole secret].
Then {G} taught {him} a trick: {trick}.

{A} [practiced|tried it|did it] once, and then once more. [It helped a little|{He} felt a bit
  calmer].
{A} nodded [slowly|bravely]. {He} held {B}'s {hand} and closed {his} eyes for a moment.
At first it [did not help|was hard]. Then {A} tried again, and {his} breath grew [slow|calm|steady].
/
Then {he} did it. [Step by step|Little by little|With a beating heart], {A} managed to {test}.
[One, two, three|Ready, steady, go]! {A} [was brave|forgot to be scared] and managed to {test} after
  all.
It took [a long time|all {his} courage], but {A} did {test}.

{He} found out that {truth}.
And what did {he} discover? That {truth}!
"[So that is all|I see now]!" {he} [laughed|said]. {He} had learned that {truth}.

"[You did it|I knew you could|Bravo]!" [cheered|cried|shouted] {B}.
{GG} [clapped|smiled|was very proud]. "[What courage|How brave you are]!" {ghe} said.
{A} felt [ten feet tall|as strong as a lion|lighter than a feather].

After that day, {A} was not so afraid of {fear} anymore.
And when {B} was scared of something, {A} knew just what to say.
-

@ending
""",
    "cooking": """
@opening

@likes
/
{Day}, {A} and {Bfull} wanted to [make|prepare] {a_food} for {G}.
{Day}, it was {G}'s birthday. "Let's make {a_food}!" said {A} to {Bfull}.
{Day}, {A} was [hungry|very hungry]. "I will make {a_food}," {he} told {his} friend {Bfull}.

{weather}
-

They [washed their {hands}|put on their aprons|took out the big bowl] and [fetched|found|looked for]
  {main} and {extra}.
"We need {main} and {extra}," said {B}, [reading the recipe|looking into the cupboard].
First they went out to get {main}. The {extra} they had at home.
/
{A} [stirred|mixed|measured], and {B} [poured|counted|chopped]. [Flour|Steam|Sugar] was everywhere.
They [mixed|stirred] and [tasted|sang] and made [quite a mess|a big mess|the kitchen very warm].
"[Not too fast|Careful]!" said {B}, but {A} was stirring like a [whirlwind|windmill].

Then {A} took the [wrong jar|jar without a label] and put in salt instead of sugar.
Then the bowl [slipped|slid] and fell with a [crash|splash], and {main} flew everywhere.
Then they [ran out to look at {a_critter}|began to play], and forgot the time. Soon there was smoke!
When they wanted to add the {extra}, the {extra} had been eaten. [Only crumbs were|Only an empty
  box was] left.

{B} tasted it and [made a face|coughed|pulled a face]. "[Yuck|Oh dear]! {A}, [what did you
  do?|something is wrong!]"
"Oh no!" [cried|groaned|wailed] {A}. "[All that work|It is ruined|It is spoiled]!"
{A} wanted to [cry|give up|hide]. "[I am a terrible cook|It was my fault|I am sorry]," {he} said.
/
{B} started to [laugh|giggle]. "[We look like ghosts|You have {extra} on your nose]!" Soon both were
  laughing.
"[Every cook makes mistakes|Nobody is born a cook|It happens to everyone]," said {G}, who had [come
  in|heard the noise].
"[We can try again|Let's start over|There is still time]," said {B}. "[This time we read everything
  twice|I will help you]."

This time, they [worked slowly|read every word|took turns], and {A} [checked|tasted] everything
  before it went in.
So they cleaned up, borrowed more {main} from a neighbor, and [began again|tried once more].
They [found|used] honey, more {main}, and a pinch of cinnamon. It was not in the recipe, but it
  smelled wonderful.
/
At last, {a_food} stood on the table. It smelled of {extra} and {main}.
When they were finished, the whole house smelled of {main}.
It did not look [perfect|like the picture], but it tasted [delicious|heavenly|wonderful].

{GG} took a bite and closed {ghis} eyes. "[This is the best I ever had|Mmm, delicious|It is
  perfect]!" {ghe}
  [said|cried].
They gave [the biggest piece|the first bite] to {G}, who [smiled|licked {ghis} lips|asked for more].
"[Who made this|Did you do this alone]?" asked {G}. "We did!" said {A} and {B} [together|proudly].

{A} learned that [a mistake is not the end|good things take time|it pays to read the label].
They [wrote the recipe down|saved one piece for later|shared the rest with the neighbors].
-

@ending
""",
    "rescue": """
@opening

@likes
/
@outing

@scene

[Suddenly|Then|All at once], they heard a [faint|small|strange] sound. A {pet} {trouble}.
"[Listen|Hush]!" said {B}. [Close by|Right there], {spot1}, they found a {pet}. It {trouble}.
{A} stopped. A {pet} {trouble}, and nobody was there to help it.

It {sound} [sadly|softly|again and again] and looked at them with [big|frightened|round] eyes.
The poor {pet} {sound}, and its little heart beat [fast|like a hammer].
"[Poor thing|Oh, you poor little {pet}]!" said {A}. It {sound} as if to answer.
/
"We have to help it," said {A}. "But how?"
{A} wanted to grab it at once, but {B} [held {him} back|stopped {him}]. "[Slowly|Gently]! It is
  scared."
"[Do not be afraid|We are friends]," [whispered|said] {A} and [sat down|knelt down] [quietly|beside
  it].

First they tried to [call it|lure it with a crumb|reach it with a stick], but that did not help.
{B} [pulled|pushed|tugged], but it was [no use|too hard|too dangerous].
They waited for someone to come by, but [nobody came|the path stayed empty].

So {A} [ran|hurried|raced] to {G}, while {B} [stayed with|kept watch over|sang to] the {pet}.
"[Wait here|I will be right back]," said {B}, and soon {bhe} came back with {G}.
Then {A} had [an idea|a plan]. "I need [your help|a steady {hand}|some rope], {B}!"
/
[Very carefully|Together|With great care], they {aid}.
{A} {aid}, and {B} [held {bhis} breath|helped as well as {bhe} could].
It took [three tries|a long while], but then {A} {aid}.

The {pet} was [safe|free|saved]! It {later}.
For a moment, the {pet} [did not move|was very still]. Then it {later}.
And the little {pet}? It {later}.

"[You saved it|You have kind hearts|That was well done]," said {G}.
"[Goodbye|Be careful], little {pet}!" called {A}, waving.
"[It is smiling|Look how happy it is]!" [said|whispered] {B}.
/
The next [day|morning|week], the {pet} came back to [see|visit] them {at}.
A few days later, [something rustled|there was a sound] {spot2}. It was the {pet}! It {later}.
From then on, the {pet} [followed them|waited for them|came to play] whenever they were {at}.
-

{A} learned that [even small friends matter|kindness is never wasted|small deeds can do great
  things].
"Helping makes me feel warm inside," said {A}[, and {B} felt the same||].
-

@closing
""",
    "race": """
@opening

@likes
/
{Day}, there was a [big|great|grand] race {at}. The prize was {a_adj} {obj}.
{Day}, a sign hung {at}. "Race today! The winner gets {a_adj} {obj}!"
{Day}, everyone came to {the_place} for the [yearly|summer|village] race. {A} dreamed of the prize,
  {a_adj} {obj}.

@scene

"I will win," [said|boasted|bragged] {A}. "Nobody is as fast as I am!" {Bfull} [said nothing|only
  smiled].
{A} had [trained|practiced] for weeks. {His} friend {Bfull} wanted to run, too.
{A} was not the fastest, but {he} [wanted to try|never gave up]. {His} friend {Bfull} stood beside
  {him}.
/
"[On your marks|Ready, steady], go!" [called|shouted] {G}. Off they [went|ran|flew].
{GG} waved a flag, and the race [began|started]. [Dust|Dirt] flew up behind them.
A horn blew, and all the runners [dashed|shot|darted] away.

{A} was [in front|ahead] right away. {B} was [close|right] behind {him}.
At first, {A} was last. Then {he} passed one runner, and then another.
{A} and {B} ran side by side, past [the old mill|the well|a stone wall|a row of poplars|a mossy
  gate|the last houses].

Then, {spot1}, {B} [tripped|stumbled|slipped] and fell. "[Ouch|Ow]! My [knee|ankle|foot]!" {bhe}
  cried.
Near the end, {A} heard a cry. {B} was sitting {spot1}, holding {bhis} [leg|foot|ankle].
Suddenly, a [strap|rope|branch] caught {B}'s foot, and down {bhe} went[ with a thud||].
/
{A} could see the finish. [Only a few more steps|It was so near]! But {he} looked back at {B}.
What should {A} do? The {adj} {obj} was so [near|close]. But {B} was [crying|hurt|all alone].
"[Run|Go on]!" called {B}. "You can win!" {A} [slowed down|stopped|thought for a moment].

Then {A} turned around. "[Some things are more important|A friend comes first]," {he} said and
  helped {bhim} up.
{A} went back and [held out {his} {hand}|gave {B} {his} arm]. "[Lean on me|Come, we walk together]."
{A} forgot the {obj}. {He} [ran back|knelt down] and wiped the dirt from {B}'s [leg|foot].

Slowly, they [limped|walked|hobbled] to the finish together. They were the very last.
Arm in arm, they crossed the line [last of all|long after the others].
They did not win. But when they arrived, everybody [cheered|clapped|stood up].
/
"You did not win the race," said {G}, "but you won [something better|a friend|my heart]."
The winner came over and held out the {adj} {obj}. "[You deserve it|This belongs to you]," the
  winner said.
{GG} had a second prize: {a_food} for the kindest runner of all. {A} shared it with {B}.

"[Thank you|I will never forget that]," said {B}. "[Next year we will both win|You are the best
  friend of all]."
{A} was tired, but [happy|proud|glad].
{A} learned that [winning is not everything|kindness is faster than any feet|it is better to be kind
  than first].

@parting

@closing
""",
    "skill": """
@opening

{A} was {trait}, but there was one thing {he} could not do: {skill}.
More than anything, {A} wanted to learn to {skill}.
Everyone {A} knew could {skill}. Only {A} could not.

@likes
/
{Day}, {A} saw {Bfull} {doing} {at}. "[Will you teach me|Can I try, too|How do you do that]?"
  {he} asked.
{Day}, {A} said, "Today I will learn to {skill}!" {He} went to {the_place} with {his} friend
  {Bfull}.
{Day}, {G} took {A} to {the_place}. "It is time you learned to {skill}," {ghe} said. {Bfull} came
  along.

@scene

{A} tried {at}, but {he} {slip}.
On the first try, {he} {slip}. On the second try, [too|it was no better].
It looked so easy! But {A} {slip}.

{B} [giggled|tried not to laugh]. Then {bhe} said, "[Sorry|I was just as bad at first]!"
"[I will never learn it|It is too hard|I am no good at this]," [grumbled|sighed|said] {A}.
{A} stamped {his} foot and [sat down|went off to sulk] {spot1}.
/
"[It took me a whole summer|Nobody learns it in one day]," said {B}. "[Try again|Don't give up]."
{GG} [sat down|came over] and said, "[Practice makes perfect|Every master was once a beginner|Big
  trees grow slowly]."
{A_critter} [fell|slipped] off a leaf, climbed up, fell, and climbed up again. {A} [watched|saw] it
  and [smiled|thought].

"Listen," said {B}. "{advice}. [That is the secret|Then it works]."
"{advice}," said {G}. {A} nodded and [tried again|got up].
Then somebody told {him} something useful. "{advice}!"

So {A} practiced on Monday, on Tuesday, and on Wednesday. [Each time it went a little better|Slowly,
  it got easier].
{A} tried ten times, and then ten times more. {He} [fell less and less|got better and better].
Every [morning|evening|afternoon], {A} went {doing} with {B} {at}. {He} made [fewer mistakes|a
  little progress] each day.
/
And then, one [day|morning|evening], it worked! {A} {proof}.
At the end of the [week|month], {A} {proof}. [Everyone stared|Nobody could believe it].
"[Look|Watch]!" shouted {A}. And {he} {proof}, just like that.

"[I did it|I can do it]!" {he} [cried|shouted|called], and {B} [cheered|clapped|whooped].
{B} [threw {bhis} hat in the air|jumped up and down]. "[Now you are better than I am|I knew you
  could do it]!"
{GG} was so proud that {ghe} [made {a_food}|gave {him} {a_adj} {obj}].

Now {A} teaches [smaller|younger|other] friends to {skill}. "{advice}," {he} always says.
{A} learned that [hard things get easier with practice|giving up is the only way to fail|trying is
  half of winning].
-

@closing
""",
    "newcomer": """
@opening

@likes
/
{Day}, [someone new|a stranger] came to {the_place}. It was {Bfull}, who had moved [from far
  away|from the city|from across the sea].
{Day}, {A} saw a new face {at}. The newcomer stood all alone {spot1}.
{Day}, {A} was {at} when {he} noticed somebody sitting {spot1}, all alone.

@scene

Nobody [talked|spoke] to the newcomer. Some even [whispered|pointed|laughed at the strange clothes].
The others were playing a game and [did not look up|pretended not to see].
"[Who is that|Why is nobody playing there]?" {A} asked {G}. "[Ask and you will know|A smile is a
  good start]," said {G}.

{A} remembered [being alone once|the first day of school|how it feels to be left out].
{A} felt [shy|unsure|a little nervous], but {he} [walked over|took a deep breath|went closer].
"[It must be hard to be new|That looks lonely]," thought {A}.
/
"Hello, I am {A}," {he} said. "[What is your name|Who are you|Do you want to play]?" "[I am|My name
  is] {B}," came the answer.
"[Hi|Hello]," said {A}. "[May I sit here|Is this seat free]?" The newcomer nodded. "My name is {B},"
  {bhe} [said|whispered].
{A} held out {his} {adj} {obj}. "[Would you like to {use}?|We could {use} together.]" "[Yes,
  please|Oh, yes]," said the newcomer. "I am {B}."

At first, {B} [was very quiet|hardly said a word|looked at the ground].
{B} told {him} about [the old home|a house full of cousins|the mountains], and {bhis} voice
  [shook|got small].
{B} [spoke|talked] in a funny way, and {A} had to [listen closely|ask twice].

Then {B} showed {him} {a_adj2} {obj2}. "[It is from home|My grandma gave it to me]," {bhe} said. "I
  like
  {using2}."
Then {A} found out that {B} also loved to {hobby}.
Then {a_critter} landed on {B}'s head, and both of them had to [laugh|giggle].
/
{A} called the others. "Come [here|and see]! This is {B}, and {bhe} knows a [great|new|wonderful]
  game!"
"[Come on|Follow me]," said {A}, and {he} took {B} to meet [the others|everyone].
Soon the others [came closer|got curious]. "[What are you doing|Can we join in]?" they asked.

They all [played|sat] together {spot2} until [the sun went down|it was dark|supper].
{B} taught everyone a [song|dance|riddle] from far away, and they taught {bhim} a game.
They shared {a_food}, and {B} got the [first|largest] piece.

"I was so afraid to come here," said {B}. "[Now I have a friend|Now it feels like home|Now I am
  glad]."
"[This was the best day since we moved|You were the first to talk to me]," said {B}. "[Thank
  you|Thanks], {A}."
That evening, {B} was [smiling|singing] all the way home.

{A} learned that [one kind word can change a day|new friends can come from anywhere|a hello costs
  nothing].
-

@closing
""",
    "surprise": """
@opening

@likes
/
{A} had a [dear|good] friend, {Bfull}. [Soon|In three days], it would be {B}'s birthday.
"[Tomorrow|On Friday] is {B}'s birthday," {A} told {G}. "[Let's plan|I want to make] a surprise!"
{Day}, {A} remembered that {his} friend {B} had a birthday.

{A} wanted to give {bhim} {a_adj} {obj}, because {B} had [always|once] wished for one.
"[What could I give {bhim}|What does {bhe} like]?" wondered {A}. Then {he} thought of {a_adj} {obj}.
{A} [saved|counted] {his} pennies and [bought|got] {a_adj} {obj} [wrapped in paper|with a big bow].

{A} hid the {obj} {spot1}, where nobody would find it.
All [week|day], {A} worked in secret. {He} [painted lanterns|wrote invitations|hung up ribbons]
  {at}.
{GG} helped {him} make {a_food} for the party {at}.
/
Then {B} came and asked, "[Do you want to play|Shall we go to {the_place}]?" "[I can't|Not
  today]," said {A} quickly.
When {B} came by, {A} [hid|jumped up] and said, "[You can't come in|I am busy]!"
Everyone was whispering. Whenever {B} came [near|close], they [fell silent|stopped].

{B} felt [hurt|sad|lonely]. "[Nobody likes me anymore|They all forgot my birthday]," {bhe} thought.
{B} walked home [slowly|with {bhis} head down] and [kicked a stone|talked to {a_critter}].
"[Did I do something wrong|Is {A} angry with me]?" {B} wondered, and a tear fell.

Meanwhile, {a_critter} [nibbled at|landed on] the gift, and {A} had to [shoo it away|wrap the {obj}
  again].
{A} saw {B}'s sad face and [almost told everything|felt terrible]. But a surprise is a surprise.
{A} worked even faster. The [ribbons|candles|balloons] were ready at last.
-
/
That [evening|afternoon], {G} said to {B}, "[Please come with me|I need your help] to {the_place}."
Then a [letter|note] came for {B}. It said, "Come to {the_place}. Look {spot1}!"
"[Close your eyes|Do not peek]," said {A}, and {he} led {B} to {the_place}.

"Surprise!" shouted [everyone|all the friends]. There were [lights|ribbons|balloons] everywhere.
[Lanterns|Candles] lit up, and everyone [jumped out|began to sing]. "Happy birthday, {B}!"

{B} could not [speak|believe it]. "You did not forget!" {bhe} [said|cried] at last.
{B} opened the gift and found the {adj} {obj}. "[Just what I wished for!|How did you know?]" {bhe}
  cried.
{B} [laughed|cried] and [hugged|thanked] everyone, and {A} [most of all|twice].
/
"I am sorry I was so secretive," said {A}. "[I did not want to spoil it|It was so hard to keep
  quiet]!"
"I thought you did not like me," said {B}. "[Never|What a silly idea]!" said {A}.
They ate {a_food} and [danced|played] until [the stars came out|late].

{B} spent the [rest of the day|whole evening] with the {obj}, {using}.
Then they all [played games|told stories] {at}, and {B} let everyone {use}.
-

{A} learned that [giving is as much fun as getting|a good secret is worth keeping|friends do not
  forget].
-

@closing
""",
    "honest": """
@opening

@likes
/
{GG} had {a_adj2} {treasure} that nobody was allowed to touch.
"You may play here," {G} always said, "but please do not touch my {adj2} {treasure}."
On a shelf stood {G}'s {adj2} {treasure}. It was {ghis} [treasure|favorite thing|pride].

{Day}, {A} and {Bfull} were playing with {a_adj} {obj} indoors, though they knew better.
{Day}, {A} wanted to show the {treasure} to {his} friend {Bfull} and took it [down|out].
{Day}, {A} and {Bfull} chased each other around the room.

[Crash|Bang|Clatter]! The {treasure} [fell down|hit the floor] and [broke|cracked|split in two].
It happened so fast. The {treasure} slipped, fell, and [broke|cracked|broke into pieces].
/
{A} [froze|went white|stood very still]. "[What now|What have I done]?" {he} [whispered|thought].
"[Oh no|Oh dear]!" [whispered|said] {B}. "[What will {yourG} say?|Now we are in trouble.]"

{A} [swept up|gathered] the pieces and hid them [under the carpet|behind the stove|in a flower
  pot|in a drawer].
{A} [pushed|shoved] the pieces behind a curtain. "Nobody will ever know," {he} said.
"Let's say the {critter} did it," said {A}, for there was {a_critter} at the window.

When {G} came home, {ghe} asked, "[Where is my {treasure}|What happened to my {treasure}]?" "[I
  don't
  know|It wasn't me]," said {A}.
{GG} [looked|searched] everywhere. "[Have you seen my {treasure}|Who took it]?" {ghe} asked. {A}
  [looked
  away|shook {his} head].
/
But {A} could not [eat|sleep|play] that evening. {His} tummy felt [like a stone|full of
  knots|strange].
Even {a_food} did not taste good. The lie [sat|lay] in {his} chest like a [stone|lump].
{A} kept thinking of the {treasure}. A lie is [heavy to carry|a bad pillow].

"You should tell the truth," said {B}. "[I will come with you|You will feel better]."
"[I have to say it|I can't stand it]," {he} told {B}. "[Go on|I will hold your {hand}]," said {B}.
In a dream, the {treasure} [talked to {him}|followed {him} around]. {A} woke up and knew what to do.
/
{A} went to {G} and said, "I broke your {treasure}. [I am so sorry|And then I lied to you]."
"{Gcall}, I have to tell you something," said {A}, and [out it all came|{he} told the whole truth].
With a [small|shaky] voice, {A} [told|confessed] everything and gave back the pieces.

{GG} was [quiet|silent] for a while. "I am sad about the {treasure}," {ghe} said, "but [glad you
  told
  me|proud of your honesty]."
"[That took courage|Thank you for telling me]," said {G}. "[A thing can be mended|No {treasure} is
  as
  important as the truth]."
{GG} sighed. Then {ghe} [opened {ghis} arms|gave {him} a hug]. "[The truth is worth more than any
  {treasure}|We all make mistakes]."

Together, they [glued|put|fixed] the pieces back together, and {B} helped, too.
To make up for it, {A} gave {G} {his} own {adj} {obj}.
{A} [helped in the house for a week|did extra chores] to make up for it.

{A} learned that [telling the truth makes the heart light|honesty is always best|a lie only makes
  things worse].
That night, {A} slept [like a stone|better than ever|deeply].

@ending
""",
    "warning": """
@opening

@likes
/
"{rule}," {G} always said. But {A} [did not listen|thought it was silly|was too curious].
{GG} had one rule. "{rule}." {A} had heard it [a hundred times|many times].
"{rule}!" said {G} before {ghe} went out. "[I promise|Yes, yes]," said {A}.

{Day}, {A} and {his} friend {Bfull} were alone {at}.
{Day}, {A} played with {Bfull} {at}, and nobody was watching.
{Day}, {A} was bored. {His} friend {Bfull} was {at}, too.

@view

"[Let's do it just once|It will be fine|Nobody will see us]," said {A}.
"[I wonder why|It can't be so bad]," said {A}. {He} [grinned|looked around|winked].
{B} shook {bhis} head. "[We are not allowed|Remember the rule|I don't think we should]," {bhe} said.
/
But {A} did not wait. {He} {deed}.
{He} thought about it for a moment. Then {he} {deed}.
{B} said, "[Don't|Stop]!" But it was too late. {A} {deed}.

At first, it was [fun|great|exciting]. But then {he} {result}.
It did not take long. {A} {result}.
And what happened? Of course, {he} {result}.

"[Help|Oh dear|Oh no]!" [cried|yelled|moaned] {A}. "[I should have listened!|Why did I do that?|That
  was a bad idea!]"
{B} [ran for help|called {G}|was very worried]. "[Hold on|Stay there]!" {bhe} [called|shouted].
{A} wanted to be brave, but {he} [cried|wept] a little.
/
{GG} came [at once|running]. {gHe} was not angry, only [worried|serious]. "[I told you so|Now you
  know why]," {ghe} said.
{GG} did not scold {him}. {gHe} only [sighed|shook {ghis} head] and [helped|took care of {him}].
"I am sorry, {Gcall}," said {A}. "[I broke the rule|You were right]."

{A} {remedy}, and [slowly|after a while] {he} felt better.
There was only one thing to do: {A} {remedy}.
With the help of {G}, {A} {remedy}.

{B} [stayed with|sat beside|read to] {him} and brought {him} {a_adj} {obj}.
"[Will you listen next time|Was it very bad]?" asked {B}. {A} nodded.
-
/
Now {A} knew: {lesson}.
"I learned something today," said {A}. "{Lesson}."
"{Lesson}," said {G}, and this time {A} [listened|agreed|knew it was true].

The next time somebody wanted to [break the rule|try it], {A} said, "[No, thank you|Better not].
  {rule}!"
From then on, when {G} [warned {him}|said no], {A} [listened|thought twice].
-

@closing
""",
    "wish": """
@opening

@likes
/
{Day}, {A} was [walking|playing] {at} when {he} met {giver}.
{Day}, {A} looked {spot1} {at}, and there was {giver}.
{Day}, {A} helped {giver} out of a [thorn bush|muddy hole|tangle of vines] {at}.

@scene

"[You are kind|You are polite|Today is your lucky day]," said {the_giver}. "You may have one wish."
"I can [give|grant] you one wish," said {the_giver}. "[Choose well|Think before you speak|But be
  careful]."

{A} did not think for long. {He} wished that {power}.
{A} [closed {his} eyes|laughed|held {his} breath] and wished that {power}.
/
[Puff|Flash|Whoosh]! And so it was: {power}.
There was a [flash of light|sound of bells|puff of smoke]. And from then on, {power}.

At first, it was wonderful, and {first_fun}.
It was [so much fun|like a dream]: {first_fun}.
{A} ran to show everybody. "[Look|Come and see]!" And yes, {first_fun}.

But [soon|after a while|on the second day], {gone_wrong}.
Then things went wrong, because {gone_wrong}.
/
"I don't like this wish anymore," {A} told {his} friend {Bfull}. {B} [nodded|sighed]. "[You have to
  find the giver|We must undo it]," {bhe} said.
{A} [missed|longed for] the old days. "[What can I do|How can I stop it]?" {he} asked {his} friend
  {Bfull}.
{GG} [came out|looked up] and said, "[What a mess|This has to stop], {A}!" {A}'s friend {Bfull}
  thought so, too.

They went back to {the_place} and [called|searched] for {the_giver}. They looked {spot1}, {spot2},
  and {spot3}.
So the two [friends|of them] looked {spot2} until they found {the_giver}.
{B} [knew|remembered] an old [rhyme|story] about such wishes. "[I know what you must do|Listen to
  me]," {bhe} said.

"[There is a way|It can be undone]," said {the_giver}, and told them what to do.
"[Please take it back|I want everything as it was]," said {A}. "Then you must do it yourself," said
  {the_giver}.
/
So {A} {undo}.
{A} [took a deep breath|was ready for anything]. Then {he} {undo}, and the magic [faded|was gone].
It sounded simple, but it was not. {A} {undo} and [waited|hoped].

[Slowly|All at once], everything was as [it had been before|always].
There was a [whisper|sigh] in the air, and the wish was undone.

"[I have all I need|Next time I will wish for something small|It is good to be just me]," said {A}.
{A} laughed and [hugged|danced with] {B}. "[A friend is better than magic|No more wishes]!"
{A} learned to [think before {he} wished|be happy with what {he} had].

@parting

@closing
""",
    "way_home": """
@opening

@likes
/
@outing

@scene

They followed {a_critter}, [farther and farther|deeper and deeper|step by step], and forgot to look
  at the way.
They played [hide and seek|tag|explorers] and went [farther|deeper] than ever before.
"[Let's see what is over there|I know a shortcut]," said {A}. They walked [and walked||for a long
  time].

Then {B} stopped. "Where are we?" {bhe} asked. [Nothing|No tree and no stone] looked familiar.
When they wanted to go home, [every path looked the same|they did not know the way|fog had covered
  the path].
It got [dark|cold|late], and they were lost.
/
"[I want to go home|I am scared]," [said|whimpered|whispered] {B}. {A} was scared, too, but {he}
  [held {bhis} {hand}|did not say so].
"[It is all my fault|I should have paid attention]," said {A}. "[No, we both forgot|Don't say
  that]," said {B}.
{A} wanted to run, but {B} said, "[Stop|Wait]! When you are lost, you [stay calm|must think]."

They [called|shouted] as loudly as they could, but only an echo answered.
First they went left, but there was only [a swamp|a wall of thorns|a steep cliff]. They had to turn
  back.
They tried to follow their footprints, but [the wind had blown them away|the rain had washed them
  away].

Then {A} saw [a light|smoke|a thin path] far away. But it was only [a firefly|mist|a trick of the
  moon].
They sat down {spot2} and shared [the last crumbs|one apple|a cookie].
"Let's ask someone," said {B}. But the {critter} they asked only [shrugged|flew away].
-
/
Suddenly, {A} had an idea. "[The river|The brook] flows past our home! [We only have to follow
  it|Listen for the water]!"
{A} looked up. "[The North Star|That bright star] always stands above our roof!" {he} said.
Then {B} remembered {bhis} {adj} {obj}. It had [left a trail|dropped little threads] all along the
  way!
"[I left marks on the trees|I dropped pebbles]," said {A} suddenly. "[I had almost forgotten|Look,
  there is the first one]!"

[Step by step|Slowly|Bravely], they went on, past [the old mill|the well|a stone wall|a row of
  poplars|a mossy gate|the last houses] and [through the tall grass|over the hill|across the field].
They sang a song to [keep up their spirits|feel brave] and [walked on|kept going].
It was a long way, and {B} got tired, so {A} carried {bhis} {obj}.

At last, they heard a voice. "{A}! {B}!" It was {G} with a lantern!
Then they saw a [yellow light|window]. "Home!" [cried|shouted] {A}.
/
{GG} [ran to them|took them both in {ghis} arms]. "[Thank goodness|I was so worried]!" {ghe} said.
"[Where have you been?|There you are!]" cried {G}, and {ghe} wrapped them in a [warm|woolly]
  blanket.

There was {a_food} on the table, and they ate [everything up|like wolves].
They told {G} everything, and {ghe} [listened|shook {ghis} head|gave them tea].
"Next time, tell me where you are going," said {G}. "[We promise|Yes]," said both.

{A} learned to [look back now and then|stay on the path|keep calm when things go wrong].
"You found the way," said {B}. "[We found it together|Not without you]," said {A}.

@closing
""",
    "garden": """
@opening

@likes
/
{Day}, {G} gave {A} and {his} friend {Bfull} a [tiny|small|wrinkled] seed. "[Something wonderful
  sleeps inside|Take good care of it]," {ghe} said.
{Day}, {A} and {his} friend {Bfull} found a [strange|round|spotted] seed {spot1} {at}.
{Day}, {A}'s friend {Bfull} came with a [handful|bag] of seeds. "[Shall we plant them|What do you
  think they are]?"
  {bhe} asked.

{A} [dug a hole|made a bed] in the ground, put the seed in, and [watered it|covered it with earth].
{A} planted it {at}, and {B} [brought water|marked the spot with a stick].
-

{weather}
"[Grow|Hurry up]!" {he} told it. "I will come every day."
/
The next day, {A} ran to look. There was nothing[ but earth||].
{A} [looked|checked] on Monday, on Tuesday, and on Wednesday. Nothing happened.
A whole week [passed|went by], and nothing grew.

"[It is not working|Maybe it is dead|I will dig it up and look]," said {A}.
{A} got [impatient|angry]. {He} [shouted at|sang to|poured three buckets of water on] the ground.
"[Where are you|Are you asleep], little seed?" asked {A}.

"[Be patient|Wait a little longer]," said {G}. "[Good things take time|A seed does its work in the
  dark]."
"[You can't hurry a seed|My cousin says plants can hear us]," said {B}. "[Let's wait together|Let's
  tell it a story]."
{A_critter} [looked at|walked over] the spot. "[Something is moving down there|Shh, it is waking
  up]," it said.

So {A} waited, and to pass the time, {he} would {hobby}.
So they waited, and they passed the time with {a_adj} {obj}.
Every day, {A} [gave it a little water|pulled out the weeds] and [waited|hoped].
/
Then, one morning, there was a [tiny|thin|small] green [tip|leaf|sprout]!
After a [night|day] of rain, something green [peeked|poked] out of the ground.
"{A}! Come [quickly|and see]!" called {B}. A [sprout|little plant] had come up.

But a [goat|slug|hungry snail] wanted to eat it, so they built a [fence|wall of stones] around it.
Then came a storm. {A} held {a_adj} {obj} over the plant so that it would not break.
It [grew|climbed] up to {his} knee, then up to {his} chin, and then above {his} head.
Then the sun burned for days, and the leaves [drooped|hung down]. They carried water from far away.

By [summer|autumn], it had [become a huge sunflower|turned into a bush full of roses|grown the
  biggest pumpkin of all| given a basket of sweet peas|become a young apple tree|grown fat red
  tomatoes].
/
"[We did it|It was worth the wait]!" said {A}, and {B} [danced around it|clapped {bhis} hands].
Everyone came to [see|admire] it. "[How did you do that?|What a wonder!]" they said.
To celebrate, they made {a_food} and invited everyone.

{A} learned that [patience is a kind of magic|good things grow slowly|some things can't be hurried].
And in the [middle|fall], {A} found new seeds. {He} gave [one|the first one] to {B}.

@closing
""",
    "owner": """
@opening

@likes
/
@outing

@scene

There, {spot1}, {A} found {a_adj} {obj}. [Nobody was around|It lay there all alone].
[Suddenly|All at once], {A} stepped on something {spot1}. It was {a_adj} {obj}!
"What is that?" asked {B}. {Spot1} lay {a_adj} {obj}.

"[How lovely|What luck]! [Finders keepers|I will keep it]!" said {A}.
{A} had always wanted {a_obj}. {He} [picked it up|held it to the light].
"It is mine now," said {A}, and {he} started {using}.
/
"But it belongs to somebody," said {B}. "[Somebody must be sad|Think how you would feel]."
Then {A} thought of {his} own {obj2}. [How sad {he} would be|{He} would cry] if it were lost!
{A} turned it over. There was a [name|letter] on it, but it was hard to read.

"[You are right|We have to give it back]," said {A}. "But [who is the owner|whose is it]?"
{A} [sighed|nodded]. "Then let's find the owner," {he} said.

First they asked a [woman with a basket|man with a long beard|girl with braids]. "No, [my {obj} is
  {adj2}|I never had one]," was the answer.
They knocked on [every door|three doors]. "[Not mine|Sorry, no]," said [everyone|the people].
They asked {G}. "[I have not seen it before|It is not mine]," {ghe} said, "but [try|go and ask]
  {spot2}."

They painted a sign: "Found: {a_obj}. Ask {A} and {B}!"
Next they asked {a_critter}. "Somebody was crying {spot3}," it [told|said to] them.
They looked {spot2}, and nobody was there.
-
/
Then they heard [sobbing|someone crying]. {Spot3} sat a [small child|little boy|little girl|very old
  lady] with a sad face.
At last, {spot3}, they met a [boy|girl|man|woman] who was looking for something.

"[Have you lost something|Are you looking for something]?" asked {A}. "[Yes, my {obj}|I lost my
  {adj} {obj}]!"
"Is this yours?" asked {A} and held out the {obj}. [Two eyes lit up|A big smile was the answer].

"[You found it|My {obj}]! [It was a gift from my godfather|I thought it was gone forever]!"
"Thank you! Thank you! [I looked everywhere|I could not sleep without it]!"
/
As a reward, they got {a_food} to share.
"[Come and play with me|You may {use} whenever you like]!" said the owner. So they all played
  together.
The reward was {a_adj2} {obj2}. {A} had not expected that.
{A} did not want a reward. "[Your smile is enough|It was nothing]," {he} said.

{A} did not have the {obj} anymore, but {he} felt [rich|light|good] inside.
"[That feels better than keeping it|Now I am happy, too]," said {A}.
{A} learned that [giving back feels better than keeping|it is right to return what we find|honest
  finders make friends].

@parting

@closing
""",
    "grumpy": """
@opening

@likes
/
Near {the_place} lived [an old man|a bear|a giant|an old woman|a troll|a lonely wolf] whom everyone
  called Grumpy.
[Close|Next] to {the_place} stood a [dark|crooked|gray] house. There lived somebody everyone called
  Grumpy.

Grumpy [never smiled|shouted at everyone|chased everyone away] and hated [noise|visitors|laughter].
"[Go away|Leave me alone|Quiet]!" Grumpy would [shout|growl|roar] whenever somebody came near.

{Day}, {A} and {his} friend {Bfull} were playing {at} with {a_adj} {obj}.
{Day}, {A} and {Bfull} played {at} with {a_adj} {obj}.
/
Then the {obj} [flew|rolled|fell] over the fence, right into Grumpy's [garden|yard].
By accident, the {obj} landed [on Grumpy's roof|at Grumpy's door|in Grumpy's soup].

"[Who did that|What is this]?" roared Grumpy. {B} [ran away|hid {spot1}|trembled].
Grumpy [stamped|growled|grumbled] and kept the {obj}. "[It is mine now|You will never get it back]!"

"[Let's go home|We will never get it back]," [whispered|said] {B}. But {A} [had another
  idea|stayed].
{A} was afraid, too. But {he} asked {himself}, "[Why is Grumpy so angry|Has anyone ever been nice to
  Grumpy]?"
"Nobody is grumpy without a reason," said {G}. "[Maybe it is loneliness|Sometimes a sad heart
  shouts]."
/
The next day, {A} [took|brought] {a_food} to Grumpy's door. "[Go away!|What do you want?]" came a
  voice.
So {A} and {B} [made|baked] {a_food} and left everything on Grumpy's step with a [note|flower].
{A} picked [daisies|some wild flowers] and laid them at Grumpy's door. The next day, {he} did it
  again.

Nothing happened. But on the third day, the door [opened a crack|creaked open]. "Why me?" asked a
  [hoarse|small] voice.
At first, Grumpy [threw everything out|slammed the door]. But {A} came back [every day|again]. "Why
  do you do this?" asked Grumpy.
The door [opened|moved] slowly, and Grumpy [looked out|peeked out]. "[Why are you so nice to me|Why
  do you bring me this]?"

"[You might be hungry|We wanted to say sorry for the noise|Everybody likes a surprise]," said {A}.
"[Because you are our neighbor|Because you are always alone]," said {A} [bravely|simply].
/
Then something [strange|wonderful] happened. Grumpy [smiled|began to cry|laughed], for the first
  time in years.
Grumpy was [silent|quiet] for a long time. "[Nobody ever visits me|I once had a friend, but that was
  long ago]."

Grumpy gave back the {obj} and [showed|taught] them how to {use} [even better|with one {hand}].
"[Here is your {obj}|I am sorry I shouted]," said Grumpy. "[Will you come again|Would you like some
  tea]?"
Inside, the house was full of [clocks|books|paintings|seashells]. Grumpy had made {a_adj2} {obj2}
  for each of them.

From then on, they [visited|came to see] Grumpy every [Sunday|week|day].
After that, nobody was afraid of Grumpy anymore, and soon everybody [forgot that name|had a better
  name for Grumpy].
Soon there was [laughter|music] in the house next to {the_place}.

{A} learned that [a kind deed opens every door|some people only need a friend|nobody is grumpy
  forever].
-

@closing
""",
    "build": """
@opening

@likes
/
@outing

@scene

"[Let's build|I want to make|Let us try to build] {work}!" said {A}. "We have {stuff}."
{A} found {stuff}. "[That is enough|We could use this] for {work}!" {he} [said|cried].
{B} [looked|pointed] at {stuff}. "Are you thinking what I am thinking?" "Yes! {Work}!" said {A}.

They [worked|toiled] all [morning|day|afternoon], [carrying|lifting], [pushing|pulling], and
  laughing.
{A} [carried|gathered] {stuff}, and {B} put everything in its place.
"[A bit to the left|Higher|Hold it straight]!" called {A}. "[Like this|Is that better]?" asked {B}.
/
It was nearly done when {ruin}.
They stepped back to [look at|admire] it. Just then, {ruin}.
It was [beautiful|perfect|the best ever]. But that night, {ruin}.

"[All our work|It is gone|Not again]!" [cried|groaned] {A}. {He} [kicked a stone|sat down {spot1}].
{A} got angry. "[It is your fault|You did it wrong]!" {he} shouted. "[No, yours|That is not true]!"
  shouted {B}.
{B} [hung {bhis} head|wanted to cry]. "[I don't want to build anymore|Let's give up]," {bhe} said.

For a while, [neither of them said a word|they sat back to back|nobody spoke].
Then {G} came by. "[The first one is only for practice|Now you know what does not work]," {ghe}
  said.
{A_critter} came, looked at what was left, and started to [build|make] its own home there. They both
  watched.
/
"[Let us think about it|I know why it happened]," said {B}. "[We were too fast|We did not plan it]."
  "[Then let's
  plan|I have an idea]," said {A}.
"I am sorry," said {A}. "[Let's try again|You are a good builder]." "[I am sorry, too|All right],"
  said {B}.
{A} [drew a plan|measured everything] and asked {G} for advice.

The second time, they {better}.
So they started again. But now they {better}.
They did not hurry this time, and they {better}.

{GG} [helped|lent them a hammer], and {B} brought {a_adj} {obj} to put on top.
Some friends [came|saw them] and helped, too.
When it was ready, they put {a_adj} {obj} on top.
-
/
And this time, it [held|lasted|did not break]! It was [better|bigger|stronger] than the first one.
The next [storm|day|morning] came, and {the_work} still stood.

"[We are real builders|We make a good team|This is our masterpiece]," said {B}.
"[Two heads are better than one|I am glad we did not give up]," said {A}, and {B} [shook {his}
  {hand}|agreed].
They sat beside it and ate {a_food}, [tired|dirty] and [happy|proud].

{A} learned that [failing is part of building|anger never built anything|good plans make strong
  walls].
-

@parting

@closing
""",
    "mystery": """
@opening

@likes
/
{Day}, {A} and {his} friend {Bfull} were {at} when they heard {noise}.
{Day}, while {A} and {Bfull} were playing {at}, there was {noise}.
{Day}, {A} told {Bfull}, "[Every day|For a week now], I hear {noise} {at}. [Come and listen|I need
  your help]!"

@scene

"What is that?" [whispered|asked] {A}. "Maybe it is {guess}," [answered|said] {B}.
"It sounds like {guess}," said {B} with [wide|round] eyes. {A} was not so sure.
{B} thought it was {guess}. {A} thought it was [a thief|the wind|a monster with three heads].
/
"[Let's find out|We are detectives now|Follow me]," said {A}, and {he} took {a_adj} {obj} along.
{B} wanted to [leave|go home|tell {G}], but {A} was too curious.
They [tiptoed|crept|sneaked] closer, holding {a_adj} {obj} in front of them.

First they listened {spot1}. The noise was [faint|quiet] there.
{Spot1}, they found [a clue|strange marks|a tuft of hair]. [It was only old straw|That did not help
  much].
They looked {spot1}, but there was only {a_critter}. "[It wasn't me|I hear it, too]," it said.

Then they [moved on|crept] and listened {spot2}. It was [louder|closer] now!
{Spot2}, the noise [stopped|was gone]. They [held their breath|waited]. Then it began again!
{A} wrote everything down: where it was loud, and where it was [soft|silent].
/
At last, they [came to|stood] where the noise was loudest: {spot3}. {A}'s heart [pounded|beat fast].
"It comes from [there|here]!" whispered {B}, pointing. {Spot3}, something [moved|shook]!

{A} [counted to three|took a deep breath] and looked. And what was it? It was {cause}!
"[One, two, three|Now]!" They looked, and there was no monster at all. It was only {cause}.
{B} closed {bhis} eyes, but {A} looked. It was {cause}!

They [looked at each other|stared] and began to laugh. "So that was {guess}!" said {A}.
"[Is that all?|And I was so scared!]" [laughed|said] {B}.
{B} [blushed|giggled]. "I really thought it was {guess}," {bhe} said.
/
Then they {cure}.
"[We can fix that|Let's help]," said {A}. And they {cure}.
They told {G} about it, and together they {cure}.

After that, it was [quiet|peaceful] {at}.
"Case closed," said {A}, and {B} [wrote it in a notebook|saluted].
"You are [clever|brave] detectives," said {G}, and gave them {a_food}.

{A} learned that [most monsters are small when you look closely|it is better to look than to guess|a
  brave look chases fear away].
"What will our next [case|mystery] be?" asked {B}. [Just then, they heard a strange sound|{A} could
  hardly wait].
-

@closing
""",
    "trade": """
@opening

@likes
/
{Day}, {A} found {first} {spot1} {at}. "[This may be useful|Maybe I can use it]," {he} said.
{Day}, {G} gave {A} {first}. "[Use it well|Small things can become big]," {ghe} said.
{Day}, all {A} had in {his} pocket was {first}.

{weather}
-

{A} dreamed of something better, but {he} [took it along|was content].
{A} wanted to show it to everyone, so {he} [set off|went] to {the_place}.
-
/
On the way, {A} met [a farmer|a boy|a girl|an old lady] who {need1}. "Let's trade! I give you
  {second} for it."
First {he} met [a shepherd|a tailor|a gentleman] who {need1}. {A} gave away {the_first} and got
  {second}.

So now {A} had {second}. [That was not bad|{He} was pleased].
"Now I have {second}," said {A}. "[How nice|That is a good trade]."

Next, {he} met [a sailor|a painter|a hiker|a nurse] who {need2}. "[Take mine|Here, take it]," said
  {A}. {He} got {third}.
A little later, {he} saw [a man|a woman|a student] who {need2}. {A} traded {the_second} for {third}.
/
With {the_third}, {A} [walked|went] on. {He} was getting tired.
"[Better and better|My luck is growing]!" thought {A}, and {he} [carried|took] {the_third} toward
  {the_place}.

Near {the_place}, there was [a stranger|a traveler|an old man] who {need3}. {A} [did not wait|had
  a kind heart]. "Please take this."
{A} almost kept it. But then {he} saw somebody who {need3}. {A} gave away {the_third} and asked for
  nothing.

"[How kind|Bless you]! Then I have something for you, too," was the answer. And {A} got {last}!
"[One good turn deserves another|You shall have a reward]," said the stranger, and gave {him}
  {last}.
/
{A} [ran|raced] to {his} friend {Bfull}. "[Guess what|You won't believe it]! First I had {first},
  and now I have {last}!"
{His} friend {Bfull} was [waiting|sitting] {spot2}. "[Where did you get that|How did you pay for
  it]?" {bhe} asked. "With {first}!" said {A}.

"[From {first} to {last}|What a day]!" [laughed|said] {B}. "[You are a real trader|I can't believe
  it]!"
{B} could not stop [laughing|staring]. "[Tell me everything|Tell it again], from {first} on!"

Of course, {A} shared it with {B}, and they had [a wonderful time|fun until evening].
"It is for [both|the two] of us," said {A}. "[What is mine is yours|Alone it is no fun]."

{A} learned that [small things can grow|kindness pays better than gold|every thing is a treasure to
  someone].
{A} kept [nothing for {himself}|only one thing for {himself}]: [the joy|the story], which [nobody|no
  one] could trade away.
-

@closing
""",
    "helper": """
@opening

@likes

{A} wanted to buy {a_adj} {obj}, but {he} did not have any money.
{A} often said, "I am too small to help anyone."
{A} was [bored|looking for something to do].
/
{Day}, {A} and {his} friend {Bfull} met {who} {at}.
{Day}, on the way to {the_place}, {A} and {Bfull} saw {who} who looked [tired|worried].
{Day}, {A} went to {the_place} with {his} friend {Bfull}. There they heard a sigh. It was {who}.

@scene

"I have to {job}," said {the_who}, "but [my back hurts|I am all alone|there is so little time]."
"[Oh dear|If only I had help]! I must {job} [before dark|by tonight]," said {the_who}.

"We can help you!" said {A}. "[We are strong|We have time]." {B} [nodded|was not so sure].
"[You are too small for that|You two want to help me]?" [laughed|said] {the_who}. "[Just watch|Let
  us try]!" said {A}.
{B} wanted to go on, but {A} said, "[First we help|The game can wait]."
/
So they began to {job}. It was harder than they had thought, because {load}.
At first, it was fun. But soon {B} [groaned|puffed]. To {job} was not so easy: {load}.

"[I can't anymore|My arms hurt]," said {B}. "[Just a little more|Think of the end]," said {A}.
{B} [sat down {spot1}|made a mistake], and they had to [rest|start again].
They sang a [work song|silly song] to make it go [faster|easier].

Then {A} had an idea. "[You do one half, and I do the other|Let's take turns|Let's make a chain]!"
{A} [thought|looked around]. {Spot2}, {he} found {a_adj2} {obj2}, and that made the work
  [easier|faster].
They asked {a_critter} for advice, but it only [stared|hummed]. So they [did it their own way|went
  on].
/
By [evening|sunset|noon], everything was done.
Finally, they had finished. They were [tired|dirty|hungry] but proud.

"I would never have managed alone," said {the_who}. "[Here is something for you|Please take this]."
  It was {reward}.
{The_who} [clapped|smiled]. "[Small helpers, great work|I was wrong about you]!" And they got
  {reward}.

"[It is beautiful|Thank you so much]!" said {A}. {B} [beamed|was speechless].
They had not expected such a present, and they [danced|cheered] with joy.
/
On the way home, {A} said, "[I am not too small after all|Helping feels good]." "[I feel it,
  too|Yes]," said {B}.
{GG} [listened|was waiting]. "[I am proud of you both|You have good hearts]," {ghe} said.
{A} [thought|spoke] of {the_reward} for [a long time|many days].

{A} learned that [nobody is too small to help|many hands make light work|work is easier with a
  friend].
-

@closing
""",
}
